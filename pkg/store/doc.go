// SPDX-License-Identifier: Apache-2.0

// Package store keeps the dataDir of a node. It has the last good policy of each source, the attachments of
// each network, the record of owned chains, the verification caches, and the lock for changes to documents
// and record. The plugin, the reconciler and enforce call it. Its invariant: a reader gets whole documents,
// each as it was before or after a change, which only root or the user of this process can have written. A
// file that is torn, invalid or refused is reported and not used. A file that a newer version wrote stays.
// Files and directories of other programs are never changed. An example:
//
//	made-by-ip-masq                           the marker; empty
//	lock, reconciler.lock, resets.lock        flock(2) for changes, of the active reconciler, and for walks
//	reconciler.sock                           the socket of the active reconciler, see Listen
//	record.json, pods.json                    the owned chains, and the pods that their namespaces exempt
//	sources/HASH.json, HASH.verified          one document a source, and its VerificationCache
//	sources/HASH.json.dropped                 a document that is about to be removed, see Drop
//	sources/HASH.json.damaged                 the text of a document that was damaged
//	record.json.damaged, pods.json.damaged    the same
//	attachments/BOOT/boot-unit                its mtime is when the boot unit ran
//	attachments/BOOT/HASH.entries             digests of plugin entries that a network's conflist had
//	attachments/BOOT/HASH/HASH                one file a container and interface, with its pod and addresses
//	attachments/BOOT/HASH/HASH.cached         the same, of a pod that had no ADD, from the runtime's cache
//	backups/                                  conflists as they were, and records of package conflist
package store
