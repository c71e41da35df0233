// SPDX-License-Identifier: Apache-2.0

// Package fswatch watches directories that may be missing, created later, or replaced. The daemon
// watches its sources, its settings and the runtime's cache with it. Its invariant: when Changed
// delivers, the new state is already watched, so a reader that reads the directories after each
// delivery sees their last state. It does not notice what inotify(7) does not report: mounts, writes
// through memory maps, and changes by other machines in a shared file system.
package fswatch
