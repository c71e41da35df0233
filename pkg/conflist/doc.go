// SPDX-License-Identifier: Apache-2.0

// Package conflist keeps the plugin entry in the runtimes' network configuration lists. Find finds the
// file of the network that a runtime uses, and an Editor inserts the plugin entry into that file or
// removes it. A Manager inserts the entry again when another program has rewritten the file, and replaces
// it when conflist.entry_file changes. The reconciler and install call them. Invariant: at any instant,
// even if the process is killed, each file of a configuration directory is one that libcni loads, either
// as it was or as it should be. The package never derives a file from one that does not parse. Only the
// plugin entry changes; all other bytes, the mode and the owner stay. An entry is never moved: behind the
// first plugin any position is right.
//
// The files, in the order in which an entry gets into a conflist:
//
//   - manager.go: a sync of the reconciler, and what it reports.
//   - find.go, multus.go: which file the runtime uses, and to which one Multus delegates.
//   - flapping.go: whether other programs remove the entry, or fight about the file.
//   - entryfile.go, record.go: which entry the network should have, by entry_file and by what ip-masq wrote;
//     otherfiles.go for the other files of the network.
//   - edit.go: what becomes of the file; generated.go for a list that is made of a single plugin's
//     configuration, copy.go for the copy that an earlier version made.
//   - text.go: the new text.
//   - backup.go, write.go: the old text is kept, and the file is exchanged in one step.
package conflist
