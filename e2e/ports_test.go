// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"math"
	"net/netip"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// masqueradedDestinations has an address of each family that no policy exempts. addrPorts returns
// consecutive addresses from there on.
var masqueradedDestinations = []netip.Addr{netip.MustParseAddr("1.2.3.0"), netip.MustParseAddr("2001:db8:5::")}

func addrPorts(first netip.Addr, count int) []netip.AddrPort {
	var all []netip.AddrPort
	for a := first; len(all) < count; a = a.Next() {
		all = append(all, netip.AddrPortFrom(a, topology.EchoPort))
	}
	return all
}

// TestKeyRandomFully compares the source ports of many flows that leave the pod from one port.
func TestKeyRandomFully(t *testing.T) {
	const count, port = 64, 30000
	onEveryBackend(t, func(t *testing.T, n *node) {
		for i, c := range []struct {
			name   string
			value  any
			random bool
		}{{"not set", nil, true}, {"true", true, true}, {"false", false, false}} {
			t.Run(c.name, func(t *testing.T) {
				n.conflist(t, "podnet", object{"randomFully": c.value, "enableIPv6": true})
				p := n.pod(t, "podnet")
				// A random port of an earlier flow is in use and would have to be changed.
				must(t, n.Node.FlushConntrack())
				for _, first := range masqueradedDestinations {
					seen := topology.Must(p.SweepUDP(addrPorts(first, count), topology.FromPort(uint16(port+i))))(t)
					same := 0
					for to, source := range seen {
						if source.Addr() != n.NodeAddr(n.Outside, to.Addr()) {
							t.Errorf("to %s: came from %s, want the node's address", to, source)
						}
						if source.Port() == uint16(port+i) {
							same++
						}
					}
					// By chance two of 64 flows keep their port once in some ten million runs.
					if c.random && same > 1 || !c.random && same != count {
						t.Errorf("to %s and following: %d of %d flows kept their port, randomFully %v", first, same, count, c.random)
					}
				}
				flag := map[bool]string{true: "fully-random", false: "random-fully"}[n.backend.variant == ""]
				if has := strings.Contains(n.rules(t), flag); has != c.random {
					t.Errorf("rules have %q: %v, want %v\n%s", flag, has, c.random, n.rules(t))
				}
			})
		}
	})
}

// portRange is a range of toPorts.
type portRange struct{ first, last int }

func (r portRange) size() int { return r.last - r.first + 1 }

func (r portRange) String() string { return fmt.Sprintf("%d-%d", r.first, r.last) }

// TestKeyToPorts counts in which ranges the ports of many flows fall. The pod sends all flows from
// one port outside the ranges, or from one in the smallest range. Each range must get the share
// that corresponds to its size.
func TestKeyToPorts(t *testing.T) {
	const count = 600
	cases := []struct {
		name   string
		ranges []portRange
		keys   object
	}{
		{"one", []portRange{{40000, 40999}}, object{}},
		{"one port", []portRange{{40000, 40000}}, object{}},
		{"two", []portRange{{1024, 29999}, {32768, 65535}}, object{}},
		{"three unequal", []portRange{{50000, 50999}, {20000, 25999}, {40000, 42999}}, object{}},
		{"three without randomFully", []portRange{{50000, 50999}, {20000, 25999}, {40000, 42999}}, object{"randomFully": false}},
		{"two for a prefix inside an exempt one", []portRange{{50000, 50999}, {20000, 25999}}, object{
			"nonMasqueradeCIDRs": []string{"1.0.0.0/8", "2001:db8::/32"}, "masqueradeCIDRs": []string{"1.2.0.0/16", "2001:db8:5::/48"},
		}},
	}
	onEveryBackend(t, func(t *testing.T, n *node) {
		for i, c := range cases {
			t.Run(c.name, func(t *testing.T) {
				var texts []string
				for _, r := range c.ranges {
					texts = append(texts, r.String())
				}
				keys := object{"toPorts": strings.Join(texts, ","), "enableIPv6": true}
				for key, value := range c.keys {
					keys[key] = value
				}
				n.conflist(t, "podnet", keys)
				p := n.pod(t, "podnet")
				for _, first := range masqueradedDestinations {
					for _, port := range []int{30000 + i, c.ranges[0].first} {
						// A port that a flow to the destination has is not assigned again.
						must(t, n.Node.FlushConntrack())
						seen := topology.Must(p.SweepUDP(addrPorts(first, count), topology.FromPort(uint16(port))))(t)
						wantUniformPorts(t, c.ranges, seen)
					}
					n.wantPortsTCP(t, p, c.ranges, first)
				}
				n.wantEveryProtocol(t)
				n.wantPortsSCTP(t, p, c.ranges)
				n.wantPingMasqueraded(t, p)
			})
		}
	})
}

// wantUniformPorts fails if a range's share of the ports differs from its size by more than five
// standard deviations, which happens once in a million ranges.
func wantUniformPorts(t *testing.T, ranges []portRange, seen map[netip.AddrPort]netip.AddrPort) {
	t.Helper()
	total, hits := 0, make([]int, len(ranges))
	for _, r := range ranges {
		total += r.size()
	}
	for to, source := range seen {
		i := rangeOf(ranges, source.Port())
		if i < 0 {
			t.Fatalf("to %s: came from %s, which is outside %v", to, source, ranges)
		}
		hits[i]++
	}
	for i, r := range ranges {
		share := float64(r.size()) / float64(total)
		want := share * float64(len(seen))
		if bound := 5 * math.Sqrt(want*(1-share)); math.Abs(float64(hits[i])-want) > bound {
			t.Errorf("%d of %d flows have ports of %s, want %.0f ± %.0f", hits[i], len(seen), r, want, bound)
		}
	}
}

func rangeOf(ranges []portRange, port uint16) int {
	for i, r := range ranges {
		if r.first <= int(port) && int(port) <= r.last {
			return i
		}
	}
	return -1
}

func (n *node) wantPortsTCP(t *testing.T, p *pod, ranges []portRange, first netip.Addr) {
	t.Helper()
	for _, to := range addrPorts(first, 20) {
		seen := topology.Must(p.SendTCP(to))(t)
		if seen.Source.Addr() != n.NodeAddr(n.Outside, to.Addr()) || rangeOf(ranges, seen.Source.Port()) < 0 {
			t.Errorf("tcp to %s: came from %s, want the node's address and a port of %v", to, seen.Source, ranges)
		}
	}
}

// wantEveryProtocol checks that the rules match each protocol that has ports.
func (n *node) wantEveryProtocol(t *testing.T) {
	t.Helper()
	rules := n.rules(t)
	for _, protocol := range []string{"tcp", "udp", "sctp"} {
		if !strings.Contains(rules, "-p "+protocol) && !strings.Contains(rules, "l4proto "+protocol) {
			t.Errorf("no rule matches %s:\n%s", protocol, rules)
		}
	}
}
