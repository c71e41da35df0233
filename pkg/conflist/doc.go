// SPDX-License-Identifier: Apache-2.0

// Package conflist keeps the plugin entry in the runtimes' network configuration lists. Find finds the file
// of the network that a runtime uses, and an Editor inserts the plugin entry into that file or removes it. A
// Manager inserts the entry again when another program has rewritten the file, and replaces it when
// conflist.entry_file changes. The reconciler and install call them. Invariant: at any instant, even if the
// process is killed, each file of a configuration directory is one that libcni loads, either as it was or as
// it should be. The package never derives a file from one that does not parse. Only the plugin entry changes;
// all other bytes, the mode and the owner stay. The position of the entry does not matter.
package conflist
