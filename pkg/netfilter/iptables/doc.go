// SPDX-License-Identifier: Apache-2.0

// Package iptables keeps masquerade chains in table nat of iptables-nft or
// iptables-legacy. It implements netfilter.Driver and netfilter.Backend, and main
// packages open it; the backends do not import each other. It reads rules from the
// kernel, over netlink or by socket option, and runs a program only to write them
// (iptables-restore) and to name a jump that it deletes (iptables -S).
// Its invariants: it writes the named chains and the jumps to them, each family in
// one transaction, and nothing else in table nat; and a rule that it decodes never
// matches more packets than the kernel's.
package iptables
