// SPDX-License-Identifier: Apache-2.0

// Package nfnetlink speaks the kernel's nf_tables protocol: netlink messages on a NETLINK_NETFILTER
// socket, as include/uapi/linux/netfilter/nf_tables.h defines them, and of ctnetlink and rtnetlink what
// package conntrack needs (nfnetlink_conntrack.h, rtnetlink.h). The backends nftables and iptables, conntrack, thirdparty
// and the reconciler's commit watcher call it; it knows nothing of the rules that ought to be there.
// Its invariant: what it returns is complete. An expression or set element that it does not know
// becomes Unknown or an error and is never left out, so that a caller can tell a rule that it
// understands from one that it does not. Messages are encoded and decoded in place instead of by a
// general netlink library, because a plugin process lives for 1.6 ms and reads sets of thousands of
// elements.
package nfnetlink
