// SPDX-License-Identifier: Apache-2.0

// Package nftables is the backend that owns one table `ip-masq` per family. enforce calls it through the
// interface netfilter.Backend; it uses netlink and runs no program. Its invariant: Apply computes its batches
// from a reading of the tables that has the rules which Observe read. If the reading is of one generation, the
// kernel accepts the batches at that generation only. Beside a program that commits all the time it is of none,
// and the kernel accepts them at any: a change that another program makes to the tables in between may be
// overwritten.
//
// The base chain is behind those of kube-proxy and iptables (100), as the first NAT rule of a hook that binds a
// connection decides. The tables are of the families ip and ip6: a nat chain in one of inet turns on connection
// tracking for IPv6 where only IPv4 is configured. Through netfilter.GuardTables the package keeps the tables
// `ip-masq-guard` too, for the chains of every backend.
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
package nftables
