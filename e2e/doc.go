// SPDX-License-Identifier: Apache-2.0

// Package e2e tests the built plugin from outside: run by cnitool behind the
// reference plugins, on nodes made of network namespaces, and judged by what
// hosts at the other side of the wire see.
//
// What it owns is the proof that the contract holds on every form in which a
// node can keep rules (nftables, iptables-nft, iptables-legacy). It has no code
// but tests; nothing may import it. `make test` builds what it runs.
package e2e
