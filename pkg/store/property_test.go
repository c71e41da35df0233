// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func anyPrefix(six bool) *rapid.Generator[netip.Prefix] {
	return rapid.Custom(func(t *rapid.T) netip.Prefix {
		if six && rapid.Bool().Draw(t, "IPv6") {
			b := [16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "address"))
			b[0] |= 0x20 // no IPv4 in it
			return netip.PrefixFrom(netip.AddrFrom16(b), rapid.IntRange(3, 128).Draw(t, "bits")).Masked()
		}
		b := [4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "address"))
		return netip.PrefixFrom(netip.AddrFrom4(b), rapid.IntRange(0, 32).Draw(t, "bits")).Masked()
	})
}

func anyPorts(t *rapid.T) *policy.Ports {
	ports := policy.Ports{}
	bounds := rapid.SliceOfDistinct(rapid.IntRange(1, 65535), rapid.ID[int]).Draw(t, "port bounds")
	slices.Sort(bounds)
	for i := 1; i < len(bounds); i += 2 {
		ports = append(ports, policy.PortRange{First: uint16(bounds[i-1]), Last: uint16(bounds[i])})
	}
	return &ports
}

// anyStatement states each key or leaves it out, and its lists may be empty.
func anyStatement(t *rapid.T) policy.SourcePolicy {
	flag := func(key string) *bool { return rapid.Ptr(rapid.Bool(), true).Draw(t, key) }
	s := policy.SourcePolicy{
		Chain:                   rapid.StringMatching(`[A-Za-z0-9][A-Za-z0-9_.]{0,20}x1`).Draw(t, "chain"),
		Backend:                 rapid.SampledFrom([]policy.Backend{"", policy.Auto, policy.IPTables, policy.NFTables}).Draw(t, "backend"),
		NomasqAllReservedRanges: flag("reserved"), MasqLinkLocal: flag("link-local"), MasqLinkLocalIPv6: flag("link-local IPv6"),
		EnableIPv6: flag("IPv6"), MasqueradeHost: flag("host"), RandomFully: flag("random"),
	}
	six := s.EnableIPv6 != nil && *s.EnableIPv6
	prefixes := func(key string) []netip.Prefix {
		if rapid.Bool().Draw(t, key+" left out") {
			return nil
		}
		return rapid.SliceOf(anyPrefix(six)).Draw(t, key)
	}
	s.NonMasqueradeCIDRs, s.SourceCIDRs, s.NonMasqueradeSourceCIDRs = prefixes("exempt"), prefixes("sources"), prefixes("exempt sources")
	s.MasqueradeCIDRs = slices.DeleteFunc(prefixes("masqueraded"), func(p netip.Prefix) bool { return slices.Contains(s.NonMasqueradeCIDRs, p) })
	if rapid.Bool().Draw(t, "interfaces") {
		s.OutputInterfaces = rapid.SliceOf(rapid.StringMatching(`[a-z][a-z0-9@.<&-]{0,13}\+?`)).Draw(t, "out")
	}
	if rapid.Bool().Draw(t, "ports") {
		s.ToPorts = anyPorts(t)
	}
	return s
}

func anyContribution(t *rapid.T) policy.Source {
	c := policy.Source{
		ID:         policy.SourceID{Kind: policy.AgentFiles},
		Policy:     anyStatement(t),
		Superseded: rapid.Bool().Draw(t, "yields"),
		Order:      rapid.Int64().Draw(t, "order"),
	}
	if rapid.Bool().Draw(t, "network") {
		c.ID = network(rapid.StringN(1, 50, -1).Draw(t, "name"))
	}
	return c
}

func TestAnyContributionIsLoadedAsItWasStored(t *testing.T) {
	top, n := t.TempDir(), 0
	rapid.Check(t, func(rt *rapid.T) {
		want := map[policy.SourceID]policy.Source{}
		n++
		d := store.Open(filepath.Join(top, fmt.Sprint(n))).WithBoot(boot)
		l, err := d.Lock(t.Context())
		ok(t, err)
		defer func() { ok(t, l.Release()) }()
		for range rapid.IntRange(1, 3).Draw(rt, "sources") {
			c := anyContribution(rt)
			want[c.ID] = c
			s, err := l.Stage(c)
			if err != nil {
				rt.Fatal(err)
			}
			ok(t, s.Commit())
		}
		s := load(t, d)
		if len(s.Sources) != len(want) || len(s.Damaged)+len(s.Newer) > 0 {
			rt.Fatalf("%+v", s)
		}
		for _, c := range s.Sources {
			if !reflect.DeepEqual(c, want[c.ID]) {
				rt.Fatalf("stored %+v, loaded %+v", want[c.ID], c)
			}
		}
		if !slices.IsSortedFunc(s.Sources, func(a, b policy.Source) int { return a.ID.Compare(b.ID) }) {
			rt.Fatalf("not sorted: %+v", s.Sources)
		}
	})
}
