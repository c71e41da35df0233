// SPDX-License-Identifier: Apache-2.0

// Package iptables keeps masquerade chains in table nat of iptables-nft or
// iptables-legacy. It implements netfilter.Driver and netfilter.Backend, and main
// packages open it; the backends do not import each other. It reads rules from the
// kernel, over netlink or by socket option. It runs a program only to write rules
// (iptables-restore), and asks one, through go-iptables, when it chooses a variant,
// when it deletes a jump, and to print a chain that it refuses to change.
// Its invariants: it writes the named chains and the jumps to them, each family in
// one transaction, and nothing else in table nat; and a rule that it decodes never
// matches more packets than the kernel's.
package iptables
