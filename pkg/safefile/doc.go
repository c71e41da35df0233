// SPDX-License-Identifier: Apache-2.0

// Package safefile replaces files in directories that other processes also write to. The packages
// conflist, install and diagnose call it for the directories of the runtimes, store and enforce for locks
// and temporary files. Its methods work on the directory that was opened, even if it is renamed meanwhile.
// Its invariant: a process that has a Dir is the only one of ip-masq that writes there, and the temporary
// files that it finds were left by a process that was killed. Where the lock cannot be created, as on a full
// disk, a process can have a Dir that it cannot write to.
package safefile
