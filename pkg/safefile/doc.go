// SPDX-License-Identifier: Apache-2.0

// Package safefile reads and replaces files in directories that other processes write to as well.
//
// A Dir is a locked directory: its methods take base names and work on the directory that was
// opened, even if it is renamed meanwhile. A file is replaced by staging a temporary file, which is
// synced before it gets its name. The packages conflist, install and diagnose, which work in the
// directories of the runtimes, use it, and store for its lock. Invariant: a process that has a Dir is the only one of ip-masq
// that writes there; temporary files that it finds were left by a process that was killed.
package safefile
