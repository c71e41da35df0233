// SPDX-License-Identifier: Apache-2.0

// Package conflist keeps the plugin entry in the runtimes' network configuration lists. Find finds
// the file of the network that a runtime uses, an Editor inserts the plugin entry into that file or
// removes it, and a Manager inserts the entry again when another program has rewritten the file; the
// reconciler and install call them. Invariant: at any instant, even if the process is killed, each
// file of a configuration directory is one that libcni loads, either as it was or as it should be.
// Nothing is written that is derived from a file which does not parse. Only the plugin entry is
// inserted or removed; all other bytes, the mode and the owner stay. It counts that the entry is
// present, not where it stands or what it says. With Editor.Own the entry is in a copy of the main
// CNI plugin's file, which stays as it is.
package conflist
