// SPDX-License-Identifier: Apache-2.0

// Package safefile reads and replaces files in directories that other processes write to as well.
//
// A Dir is an open directory: its methods take base names and work on the directory that was
// opened, even if it is renamed meanwhile, and they never follow a symlink in it. A file is
// replaced by staging a temporary file, which is synced before it gets its name. A process that
// holds the lock of a Dir is the only one of ip-masq that writes there; temporary files that it
// finds were left by a process that was killed. The package store, which keeps the dataDir, uses
// it, and so do conflist, install and doctor, which work in the directories of the runtimes.
package safefile
