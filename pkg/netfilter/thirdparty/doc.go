// SPDX-License-Identifier: Apache-2.0

// Package thirdparty reads the source NAT rules of other programs. They are in base chains of type nat at the
// hook postrouting, with the chains that these jump to, in nf_tables (iptables-nft and native) and in
// iptables-legacy. doctor and the metrics call Scan for the rules that masquerade, explain calls Trace
// for the rules that decide about the traffic to one address. doctor also asks for rules that keep packets
// from connection tracking (Untracked) or from an owned chain (Accepted), for the node ports in the rules of
// kube-proxy (NodePorts), and for the variants of iptables in use. Scan and Trace are about the first packet of a connection,
// without a packet mark: rules that need one (of kube-proxy, of portmap) are left out. Its invariant: it
// writes nothing, also not by reading (iptables-legacy creates a table that is asked for), and it never says
// for certain that a rule applies to more packets than it does; parts of a rule that cannot be decoded are
// named, and the rule is not Exact.
package thirdparty
