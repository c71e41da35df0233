// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// FuzzDecodeRule feeds the decoder of rules. A rule that has nothing Unknown in
// it must be the same when written and read again.
func FuzzDecodeRule(f *testing.F) {
	f.Add(encodeRule(f, "c", everyExpr(), "comment"))
	for _, e := range everyExpr() {
		f.Add(encodeRule(f, "c", []Expr{e}, ""))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		rule, err := decodeRule(b, "c")
		if err != nil {
			return
		}
		var w attrWriter
		w.str(unix.NFTA_RULE_CHAIN, rule.Chain)
		w.u64(unix.NFTA_RULE_HANDLE, rule.Handle)
		w.expressions(rule.Exprs)
		w.comment(rule.Comment)
		if w.err != nil {
			return
		}
		again, err := decodeRule(w.b, "")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(rule, again); diff != "" {
			t.Errorf("(-first +again):\n%s", diff)
		}
	})
}

// FuzzDecodeMessages feeds the decoders of all other answers, as a datagram.
func FuzzDecodeMessages(f *testing.F) {
	var b Batch
	b.AddTable(IPv4, "t")
	b.AddChain(IPv4, "t", "c", &Base{Type: "nat", Hook: unix.NF_INET_POST_ROUTING, Priority: -5, Policy: Accept})
	b.AddSet(IPv6, "t", AddressRanges(IPv6, "s"))
	b.AddSet(IPv4, "t", AddressPairs(IPv4, "self", 65535, time.Minute))
	b.AddElements(IPv6, "t", "s", many(IPv6, 3))
	f.Add(b.serialize(new(uint32), true))
	f.Fuzz(func(t *testing.T, b []byte) {
		for it := (messageIter{rest: b}); it.next(); {
			if err := decodeError(it.message); err != nil && err.Error() == "" {
				t.Error("an error without a text")
			}
			if len(it.payload) < nfgenHeader {
				continue
			}
			attrs := it.payload[nfgenHeader:]
			_, _ = decodeAttrs(attrs, decodeChain)
			set, err := decodeAttrs(attrs, decodeSet)
			if err != nil {
				set = interval(4)
			}
			elems, err := decodeElems(attrs)
			if err != nil {
				continue
			}
			ranges, err := set.ranges(elems)
			if err != nil {
				continue
			}
			for i, r := range ranges {
				if i > 0 && r.From().Less(ranges[i-1].From()) {
					t.Errorf("range %v after %v", r, ranges[i-1])
				}
			}
		}
	})
}

// FuzzNotifications feeds datagrams to the kernel's filter and to the decoder of a Listener. The filter must not
// drop what touches a watched object, as far as the decoder can tell.
func FuzzNotifications(f *testing.F) {
	w := watched()
	for i, table := range []string{"ip-masq", "ip-masq-guard", "nat", "kube-proxy", "ip"} {
		var b Batch
		b.AddTable(IPv4, table)
		b.AddChain(IPv4, table, []string{"POSTROUTING", "MASQ", "KUBE-SVC"}[i%3], nil)
		b.AddSet(IPv6, table, AddressRanges(IPv6, "s"))
		b.AddElements(IPv6, table, "s", many(IPv6, 3))
		for it := (messageIter{rest: b.serialize(new(uint32), true)}); ; {
			before := it.rest
			if !it.next() {
				break
			}
			f.Add(before[:len(before)-len(it.rest)])
		}
	}
	for _, chain := range []string{"POSTROUTING", "MASQ", "KUBE-SVC", "KUBEX"} {
		for _, typ := range []uint16{unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE, unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN} {
			var m attrWriter
			for _, table := range []string{"filter", "nat"} {
				at := m.beginMessage(messageType(typ), 0, IPv4, 0)
				m.str(unix.NFTA_RULE_TABLE, table)
				if typ == unix.NFT_MSG_NEWCHAIN || typ == unix.NFT_MSG_DELCHAIN {
					m.str(unix.NFTA_CHAIN_NAME, chain)
				} else {
					m.str(unix.NFTA_RULE_CHAIN, chain)
				}
				m.u64(unix.NFTA_RULE_HANDLE, 1)
				m.endMessage(at)
			}
			f.Add(m.b)
		}
	}
	passes := filtered(f, &w)
	f.Fuzz(func(t *testing.T, datagram []byte) {
		if len(datagram) == 0 || len(datagram) >= eventSize {
			return
		}
		touched, it := false, messageIter{rest: datagram}
		for it.next() {
			switch kind := it.typ & 0xff; {
			case it.typ>>8 != unix.NFNL_SUBSYS_NFTABLES, kind == unix.NFT_MSG_GETCHAIN, kind == unix.NFT_MSG_GETRULE:
				return // never announced
			}
			attrs := attrIter{rest: it.payload[min(nfgenHeader, len(it.payload)):]}
			table := nested(attrs.rest, unix.NFTA_TABLE_NAME)
			for attrs.next() {
			}
			if attrs.malformed || len(table) > 0 && table[len(table)-1] != 0 {
				return // the kernel's attributes end within the message, and its names with a NUL
			}
			touched = touched || it.typ == messageType(unix.NFT_MSG_NEWGEN) || w.touches(it.message)
		}
		if !passes(datagram) && (touched || it.malformed) {
			t.Error("the filter drops it")
		}
	})
}

// filtered returns a function that reports whether the kernel passes a datagram, which it must not trim.
func filtered(t testing.TB, w *Watched) func(datagram []byte) bool {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err == nil {
		err = w.attachFilter(pair[1])
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = unix.Close(pair[0]), unix.Close(pair[1]) })
	in := make([]byte, eventSize)
	return func(datagram []byte) bool {
		_, err := unix.Write(pair[0], datagram)
		if err != nil && !errors.Is(err, unix.EPERM) { // of some kernels, when it drops
			t.Error(err)
		}
		n, err := unix.Read(pair[1], in)
		if err == nil && n != len(datagram) {
			t.Errorf("passed %d of %d bytes", n, len(datagram))
		}
		return err == nil
	}
}

// TestFilterDrops: the kernel does not pass what kube-proxy writes, of which there is much.
func TestFilterDrops(t *testing.T) {
	w := watched()
	passes := filtered(t, &w)
	for _, tc := range []struct {
		table, chain string
		passes       bool
	}{{"kube-proxy", "services", false}, {"nat", "KUBE-SVC", false}, {"nat", "KUBEX", true}, {"nat", "MASQ", true}, {"ip-masq", "c", true}} {
		var m attrWriter
		for range 20 {
			at := m.beginMessage(messageType(unix.NFT_MSG_NEWRULE), 0, IPv4, 0)
			m.str(unix.NFTA_RULE_TABLE, tc.table)
			m.str(unix.NFTA_RULE_CHAIN, tc.chain)
			m.u64(unix.NFTA_RULE_HANDLE, 1)
			m.endMessage(at)
		}
		if got := passes(m.b); got != tc.passes {
			t.Errorf("%s %s: passes %t", tc.table, tc.chain, got)
		}
	}
}

// FuzzXT feeds the decoders of xtables' structures.
func FuzzXT(f *testing.F) {
	f.Add(uint32(0), masquerade4(f, unix.NF_NAT_RANGE_PROTO_SPECIFIED, 1, 2, 3, 4))
	f.Add(uint32(0), masquerade6(f, unix.NF_NAT_RANGE_PROTO_SPECIFIED, 1, 2, 3, 4))
	f.Add(uint32(1), make([]byte, 8))
	f.Add(uint32(0), make([]byte, 24))
	f.Add(uint32(0), make([]byte, 256))
	f.Fuzz(func(t *testing.T, rev uint32, info []byte) {
		for _, family := range []Family{IPv4, IPv6} {
			for _, name := range []string{"addrtype", "comment", "statistic", "mark", "conntrack"} {
				d := Decode(family, Rule{Exprs: []Expr{Match{Xt: name, Rev: rev, Info: info}}}, nil)
				if len(d.Unrecognized) > 0 && d.Comment != "" {
					t.Errorf("%s: %+v", name, d)
				}
			}
			d := Decode(family, Rule{Exprs: []Expr{Target{Xt: "MASQUERADE", Rev: rev, Info: info}}}, nil)
			if m := d.To; len(d.Unrecognized) > 0 && m != (Translation{}) || m.Flags&unix.NF_NAT_RANGE_PROTO_SPECIFIED == 0 && m.PortMin|m.PortMax != 0 {
				t.Errorf("MASQUERADE: %+v", d)
			}
		}
	})
}
