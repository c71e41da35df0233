// SPDX-License-Identifier: Apache-2.0

// Package nftables keeps masquerade chains in tables of ours alone, `ip ip-masq`
// and `ip6 ip-masq`, over netlink and without any program on the host:
//
//	table ip ip-masq {
//		set exempt-IP-MASQ-AGENT { type ipv4_addr; flags interval; elements = { 10.0.0.0/8, … } }
//		chain postrouting {
//			type nat hook postrouting priority 101; policy accept;
//			fib daddr type != local jump masq-IP-MASQ-AGENT
//		}
//		chain masq-IP-MASQ-AGENT {
//			ip daddr @exempt-IP-MASQ-AGENT counter return
//			counter masquerade fully-random
//		}
//	}
//
// Priority 101 is behind kube-proxy's and iptables' chains: of the NAT rules of a
// hook the first to bind wins. The tables are never inet, which would switch
// connection tracking on for the other family too.
//
// What is written is decided by comparing a model of the table with the desired
// chains (plan.go), apart from reading it (observe.go) and writing it (apply.go).
package nftables
