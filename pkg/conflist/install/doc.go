// SPDX-License-Identifier: Apache-2.0

// Package install brings the plugin to a node and takes it away again: the binary
// in the directory from which runtimes run plugins, and our entry in the conflist.
//
// Its invariant: a conflist that names the plugin stands beside a binary that can
// run there, and so does a container that a runtime will end by a conflist which
// it has kept. On the way in the binary comes first, and is run before it gets
// its name; on the way out it goes last. That holds at any instant, and after a
// kill at any instant: what is left then is done by the next call, and what must
// be removed was not written where a runtime would meet it.
//
// A binary is never written in place, so nobody who runs it can be in the way, and
// whoever runs it meanwhile has one that is whole.
//
// The reconciler's main may import it. Of this module it imports conflist, config,
// safefile and policy alone; what becomes of rules and state it is given as a function.
package install
