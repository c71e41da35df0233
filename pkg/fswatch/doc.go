// SPDX-License-Identifier: Apache-2.0

// Package fswatch tells that something changed in directories, which may be
// missing, come later, and be replaced.
//
// Its invariant: after a change, what Changed delivers comes when the watch on
// the new state stands already. Who looks at the directories then, and again
// each time, has seen the last state of them; what happens while he looks is
// told of once more. So a name on the way to a directory is looked up only
// after the directory that holds it is watched, and when such a name changes
// the whole way is gone through anew.
//
// It tells neither what changed nor whether it matters: that is for who reads
// the files. It imports nothing of this module, and whatever waits for files may
// import it.
//
// What the kernel does not tell (inotify(7)) is not noticed: something mounted
// over a directory, a write through a memory map, a change that another machine
// makes in a shared file system. Whoever needs those looks from time to time.
package fswatch
