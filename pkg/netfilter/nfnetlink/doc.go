// SPDX-License-Identifier: Apache-2.0

// Package nfnetlink speaks nf_tables with the kernel: netlink messages on a
// socket of NETLINK_NETFILTER, and nothing above them.
//
// It owns the wire format. What it reads is what the kernel said, complete: an
// expression that it does not know, or that does not have the form it knows,
// becomes an Unknown and is never left out, so that a caller can tell a rule it
// understands from one it does not. What it writes is one transaction, applied
// whole or not at all.
//
// It has no opinion about what rules ought to be there. The adapters nftables
// and iptables, siblings of this package, import it; it imports nothing else of
// this module. Besides nf_tables it decodes the few xtables structures that
// iptables rules consist of (AddrType, Comment, Statistic, Masquerade), which
// are the same bytes in either variant of iptables.
//
// Messages are encoded and decoded in place rather than by a general netlink
// library: a plugin process that lives for 1.6 ms reads sets of thousands of
// elements, and a copy of each nested attribute would cost more than the rest.
//
// Formats: include/uapi/linux/netlink.h, netfilter/nfnetlink.h and
// netfilter/nf_tables.h of Linux.
package nfnetlink
