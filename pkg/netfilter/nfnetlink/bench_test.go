// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// BenchmarkRead does what a plugin does when all is right: it opens a
// connection, reads a table with one set of n ranges, and closes it.
func BenchmarkRead(b *testing.B) {
	for _, n := range []int{4, 64, 1000, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			namespace(b)
			c := dial(b)
			var batch Batch
			batch.AddTable(IPv4, "ip-masq")
			batch.AddChain(IPv4, "ip-masq", "postrouting", postrouting())
			batch.AddChain(IPv4, "ip-masq", "masq-X", nil)
			batch.AddSet(IPv4, "ip-masq", AddressRanges(IPv4, "exempt"))
			batch.AddElements(IPv4, "ip-masq", "exempt", many(IPv4, n))
			batch.AddRule(IPv4, "ip-masq", "postrouting", []Expr{Verdict{Code: Jump, Chain: "masq-X"}}, "ip-masq")
			batch.AddRule(IPv4, "ip-masq", "masq-X", []Expr{
				Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 16, Len: 4, Dreg: Reg1},
				Lookup{Set: "exempt", Sreg: Reg1}, Counter{}, Verdict{Code: Return},
			}, "")
			batch.AddRule(IPv4, "ip-masq", "masq-X", []Expr{Counter{}, Masq{Flags: unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY}}, "")
			commit(b, c, &batch)
			b.ReportAllocs()
			for b.Loop() {
				c := must[*Conn](b)(Dial())
				must[Table](b)(c.Table(IPv4, "ip-masq"))
				must[[]Chain](b)(c.Chains(IPv4, "ip-masq"))
				must[[]Rule](b)(c.Rules(IPv4, "ip-masq", ""))
				for _, s := range must[[]Set](b)(c.Sets(IPv4, "ip-masq")) {
					if _, ranges, err := c.Ranges(IPv4, "ip-masq", s.Name); err != nil || len(ranges) != n {
						b.Fatalf("%d ranges, %v", len(ranges), err)
					}
				}
				if err := c.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkReadCompatChain reads a chain of n rules in the form of iptables-nft.
func BenchmarkReadCompatChain(b *testing.B) {
	for _, n := range []int{64, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			namespace(b)
			c := dial(b)
			var batch Batch
			batch.AddTable(IPv4, "nat")
			batch.AddChain(IPv4, "nat", "IP-MASQ-AGENT", nil)
			for range n {
				batch.AddRule(IPv4, "nat", "IP-MASQ-AGENT", []Expr{
					Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 16, Len: 4, Dreg: Reg1},
					Bitwise{Sreg: Reg1, Dreg: Reg1, Len: 4, Mask: []byte{255, 240, 0, 0}, Xor: make([]byte, 4)},
					Cmp{Op: Equal, Sreg: Reg1, Data: []byte{172, 16, 0, 0}},
					Match{Xt: "comment", Info: padded([]byte("ip-masq-agent: local traffic is not subject to MASQUERADE"), 256)},
					Counter{}, Verdict{Code: Return},
				}, "")
			}
			commit(b, c, &batch)
			b.ReportAllocs()
			for b.Loop() {
				if rules := must[[]Rule](b)(c.Rules(IPv4, "nat", "IP-MASQ-AGENT")); len(rules) != n {
					b.Fatalf("%d rules", len(rules))
				}
			}
		})
	}
}
