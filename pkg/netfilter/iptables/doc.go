// SPDX-License-Identifier: Apache-2.0

// Package iptables keeps masquerade chains in table nat of iptables, in either
// variant: iptables-nft and iptables-legacy. It implements netfilter.Driver and
// netfilter.Backend.
//
// Its invariant: of what other programs have in table nat it touches nothing.
// It writes the named chains and the rules of POSTROUTING that lead to them, of
// each family in one transaction of iptables-restore, and only what differs.
//
// It reads without running a program, from nf_tables by netlink and from
// iptables-legacy by socket option, and falls back to what `iptables -S` shows.
// All three readers say the same of the same rules, and none takes a rule for one
// that matches more: what is not understood in full is an alien. (The text of
// iptables-nft leaves out what nft wrote into its table; it is taken alone only
// where netlink itself fails.)
//
// A main package may import it; packages beside it may not.
package iptables
