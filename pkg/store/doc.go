// SPDX-License-Identifier: Apache-2.0

// Package store owns the dataDir of a node: what each source contributes (the
// last good of it), which containers are attached to which network, what we own
// in the kernel, and the lock under which all of that changes, but for the
// attachments.
//
//	dataDir/                                    0700
//	  made-by-ip-masq                           the marker; empty
//	  lock                                      flock(2); goes with the dataDir alone
//	  reconciler.lock                           flock(2) of the one that runs
//	  record.json                               what we own in the kernel
//	  sources/HASH.json                         one document a source
//	  sources/HASH.json.dropped                 one that is about to be removed, see Drop
//	  sources/HASH.verified                     what the last ADD verified, see VerificationCache
//	  attachments/BOOT/HASH/HASH                one empty file a container and interface
//	  backups/                                  conflists as they were, written by conflist
//
// Its invariant: whoever reads sees whole documents, each as it was before or
// after a change, that only root or the user of this process can have written.
// A document is replaced by rename(2), never written in place (a verification cache is, for a
// torn one vouches for nothing); what is torn, of
// another form, a symlink, another user's or writable by others is reported
// and never believed; and what a newer version wrote is left alone. A name that
// comes from outside becomes part of a path only as its hash. A directory that
// ip-masq did not make is refused, and nothing is removed or renamed but files and
// directories whose names and kinds are in layout.go.
//
// The package may import policy, and nothing else of this module. The plugin,
// the reconciler and what they share, enforce, may import it.
package store
