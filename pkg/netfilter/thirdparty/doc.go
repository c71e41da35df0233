// SPDX-License-Identifier: Apache-2.0

// Package thirdparty judges what the rules of other programs do to the source address of a packet. It reads
// the chains of nf_tables (iptables-nft and native) and of iptables-legacy at the hook postrouting once, with
// their sets, and answers questions about packets from that reading alone. explain, doctor, status and the
// metrics ask it.
//
// An answer is one of three: yes, no or perhaps. A condition is perhaps if it depends on what the question
// does not state (a port, the source), or if this package does not know the match. A packet that meets a rule
// perhaps is followed both ways, so a verdict has every outcome that is possible, and it is certain only
// where all of them agree. A walk over sets of packets was the alternative: it took conditions that it could
// not represent for conditions that all packets meet, and a verdict map for a rule that does nothing.
//
// ipsets (-m set), which kube-proxy's mode ipvs, Calico and kube-router match in POSTROUTING, are perhaps.
// Reading them was considered: a rule has only the number of a set, for which the kernel has a socket option
// beside nfnetlink, the sets have thirty types, and they change without a new generation of the ruleset.
// KUBE-LOOP-BACK would be perhaps all the same, as it has ports.
//
// Its invariant: it writes nothing, also not by reading (iptables-legacy creates a table that is asked for),
// and no packet gets an outcome that its verdict does not have.
package thirdparty
