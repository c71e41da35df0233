// SPDX-License-Identifier: Apache-2.0

// Package topology builds a node with pods and the world around it out of
// network namespaces, and says what the other side of the wire saw.
//
//	pod ─┐        ┌─ lan: knows where pods are
//	     ├─ node ─┤
//	pod ─┘        └─ outside: the rest of the world
//
// What it owns is this invariant: an address that it reports as seen was read
// from a packet by the host that received it. It sets no address translation
// up, nor any filter; what a test wants to see happen, the test must cause.
//
// Both remote hosts answer at every address that the node routes to them, in
// both families, so a test may send wherever it likes. Everything is dual stack
// and usable at once: no duplicate address detection, nothing to wait for.
//
// The package works inside a sandbox only (e2e/sandbox), and nowhere else. Only
// tests and the demo may import it.
package topology
