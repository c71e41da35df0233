// SPDX-License-Identifier: Apache-2.0

// Package thirdparty reads the NAT rules of others: what in any base chain of type
// nat at the hook postrouting masquerades or source-NATs, or in a chain that is
// reached from there, in nf_tables (iptables-nft and native) and in
// iptables-legacy.
//
// Its invariant: it only reads. It writes no rule, makes no table, and looks at
// iptables-legacy only where somebody else uses it already. And it never takes
// a rule for one that surely matches more than it does: what cannot be read of a
// rule, or of what stands before it, is named, and the rule is not Exact.
//
// What it says is about ordinary packets: the first of their connection, and without
// a mark. A rule that needs one (kube-proxy's, portmap's) is said to be about marked
// packets only.
//
// Scan returns what masquerades; Trace follows traffic to one address through all base
// chains and returns what decides about it.
//
// It may import policy, the port, nfnetlink and, for tables of iptables-legacy,
// iptables. The reconciler and doctor may import it; a backend may not.
package thirdparty
