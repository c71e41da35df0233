// SPDX-License-Identifier: Apache-2.0

// Command demo shows the plugin's effect on real packets, between network namespaces for a node
// with two pods, a LAN that has routes to pods and an outside host that has none. It shows the
// conflist, an ADD by cnitool, the source addresses that receivers see and why, the chain as
// iptables or nft list it, and a change of the conflist. It leaves nothing behind. `make demo` runs
// it.
package main
