// SPDX-License-Identifier: Apache-2.0

// Package iptables keeps masquerade chains in table nat of iptables-nft or
// iptables-legacy. It implements netfilter.Driver and netfilter.Backend, and main
// packages open it; the backends do not import each other. It reads rules from the
// kernel, over netlink or by socket option. It writes rules by iptables-restore. What
// else it asks a program, it asks through go-iptables (ask.go), but for the variant
// of a program whose name does not tell it.
// Its invariants: it writes the named chains and the jumps to them, each family in
// one transaction, and nothing else in table nat; and a rule that it decodes never
// matches more packets than the kernel's.
package iptables
