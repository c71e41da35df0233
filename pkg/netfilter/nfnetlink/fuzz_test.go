// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// FuzzDecodeRule feeds the decoder of rules. A rule that has nothing Unknown in
// it must be the same when written and read again.
func FuzzDecodeRule(f *testing.F) {
	f.Add(encodeRule(f, "c", everyExpr(), "comment"))
	for _, e := range everyExpr() {
		f.Add(encodeRule(f, "c", []Expr{e}, ""))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		rule, err := decodeRule(b)
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
		again := assert.Must(decodeRule(w.b))(t)
		assert.Equal(t, "again", again, rule)
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
		for m, rest, ok := cutMessage(b); ok; m, rest, ok = cutMessage(rest) {
			if err := decodeError(m); err != nil && err.Error() == "" {
				t.Error("an error without a text")
			}
			if len(m.payload) < nfgenHeader {
				continue
			}
			attrs := m.payload[nfgenHeader:]
			_, _ = decodeAttrs(attrs, decodeChain)
			checkRanges(t, attrs)
		}
	})
}

// checkRanges fails the test if the elements in attributes decode to ranges that are out of order.
func checkRanges(t *testing.T, attrs []byte) {
	t.Helper()
	set, err := decodeAttrs(attrs, decodeSet)
	if err != nil {
		set = interval(4)
	}
	elems, err := decodeElems(attrs)
	if err != nil {
		return
	}
	ranges, _ := set.ranges(elems)
	for i, r := range ranges {
		if i > 0 && r.From().Less(ranges[i-1].From()) {
			t.Errorf("range %v after %v", r, ranges[i-1])
		}
	}
}

// FuzzNotifications feeds datagrams to the decoder of a Listener.
func FuzzNotifications(f *testing.F) {
	l := Listener{watched: watched()}
	for _, table := range []string{"ip-masq", "nat", "kube-proxy"} {
		var b Batch
		b.AddTable(IPv4, table)
		b.AddChain(IPv4, table, "MASQ", nil)
		b.AddRule(IPv4, table, "KUBE-SVC", nil, "")
		f.Add(b.serialize(new(uint32), true))
	}
	f.Fuzz(func(_ *testing.T, datagram []byte) {
		for m, rest, ok := cutMessage(datagram); ok; m, rest, ok = cutMessage(rest) {
			l.touches(m)
			_, _ = l.commit(m)
		}
	})
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
