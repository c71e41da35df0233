// SPDX-License-Identifier: Apache-2.0

// Package fswatch watches directories that may be missing, created later, or replaced. The reconciler's
// loop, its settings and the conflist manager use it. Its invariant: when Changed delivers, the new state
// is already watched, so a reader that reads the directories after each delivery sees their last state.
// To this end a name on the way to a directory is looked up only after its parent is watched, and after
// each event all directories are looked up again. Events do not say what changed. Changes
// that inotify(7) does not report are not noticed: mounts over a directory, writes through memory maps, and
// changes that other machines make in a shared file system.
package fswatch
