// SPDX-License-Identifier: Apache-2.0

// Package nfnetlink speaks the kernel's nf_tables protocol (linux/netfilter/nf_tables.h), and what
// ip-masq needs of ctnetlink and rtnetlink. The backends, conntrack, thirdparty and the
// reconciler's commit watcher call it; it knows nothing of the rules that ought to be there. Its
// invariant: what it returns is complete. An expression that it does not know becomes Unknown, and
// Conn.Ranges returns an error for a set element that it does not know: neither is left out. (Keys
// and Contents say what they leave out.) Messages are encoded and decoded in place
// instead of by a general netlink library, because a plugin process lives for 1.6 ms and reads sets
// of thousands of elements.
package nfnetlink
