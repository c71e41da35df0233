// SPDX-License-Identifier: Apache-2.0

// Command demo shows on real packets what the plugin does: a node with two pods,
// a LAN that knows pods and an outside that does not, all of them network
// namespaces; the conflist, cnitool ADD, who saw which address and why, the
// chain as the administrator's tools show it, and a change of the conflist.
// It leaves nothing behind. `make demo` runs it.
package main
