// SPDX-License-Identifier: Apache-2.0

// Package topology builds a node with pods, a LAN and an outside host from network namespaces, for
// tests and the demo inside a sandbox (e2e/sandbox). An address that it reports as seen was read
// from a packet by the host that received it. It configures no NAT and no filter. Both remote hosts
// answer at every address that the node routes to them, in both families. Everything is dual stack
// and usable at once: there is no duplicate address detection.
//
//	pod ─┐        ┌─ lan: has routes to the pods
//	     ├─ node ─┤
//	pod ─┘        └─ outside: the rest of the world
package topology
