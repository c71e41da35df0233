// SPDX-License-Identifier: Apache-2.0

// Package thirdparty reads the source NAT rules of other programs, in nf_tables (iptables-nft and
// native) and in iptables-legacy: the base chains of type nat at the hook postrouting, with the
// chains that these jump to. doctor, the metrics and explain call it. Scan and Trace are about the
// first packet of a connection, without a packet mark: rules that need one (of kube-proxy, of
// portmap) are left out. Its invariant: it writes nothing, also not by reading (iptables-legacy
// creates a table that is asked for), and it never says for certain that a rule applies to more
// packets than it does; parts of a rule that cannot be decoded are named, and the rule is not
// Exact.
package thirdparty
