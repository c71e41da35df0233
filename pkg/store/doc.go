// SPDX-License-Identifier: Apache-2.0

// Package store keeps the dataDir of a node: the last good policy of each source, the attachments of each
// network, the record of owned chains, and the lock for changes to all of them except attachments.
//
//	dataDir/                                    0700
//	  made-by-ip-masq                           the marker; empty
//	  lock                                      flock(2); removed with the dataDir only
//	  reconciler.lock                           flock(2) of the active reconciler
//	  record.json                               the owned chains
//	  sources/HASH.json                         one document a source
//	  sources/HASH.json.dropped                 a document that is about to be removed, see Drop
//	  sources/HASH.verified                     see VerificationCache
//	  attachments/BOOT/HASH/HASH                one empty file a container and interface
//	  backups/                                  conflists as they were, written by conflist
//
// The plugin, the reconciler and enforce call it. Its invariant: a reader gets whole documents, each as it
// was before or after a change, which only root or the user of this process can have written. Documents
// are replaced by rename(2). A file that is torn, invalid, a symlink, another user's or writable by other
// users is reported and not used; documents of a newer version stay. Names from configurations become
// file names as hashes only. A directory that ip-masq did not create is refused, and only files whose
// names and kinds are in layout.go are removed or renamed.
package store
