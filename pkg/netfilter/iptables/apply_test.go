// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// prefixGen draws prefixes of any length, near enough to each other to nest.
func prefixGen() *rapid.Generator[netip.Prefix] {
	return rapid.Custom(func(t *rapid.T) netip.Prefix {
		var a netip.Addr
		if rapid.Bool().Draw(t, "v6") {
			b := [16]byte{0: 0xfd, 15: 1}
			for i := range 3 {
				b[rapid.IntRange(0, 15).Draw(t, "at")] = rapid.Byte().Draw(t, fmt.Sprint("byte", i))
			}
			a = netip.AddrFrom16(b)
			if a.Is4In6() {
				b[0] = 0xfd
				a = netip.AddrFrom16(b)
			}
		} else {
			a = netip.AddrFrom4([4]byte{rapid.SampledFrom([]byte{10, 169, 224, 0}).Draw(t, "first"), rapid.Byte().Draw(t, "second"), 0,
				rapid.Byte().Draw(t, "last")})
		}
		p, err := a.Prefix(rapid.IntRange(0, a.BitLen()).Draw(t, "length"))
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
}

func policyGen(chain string) *rapid.Generator[policy.Policy] {
	return rapid.Custom(func(t *rapid.T) policy.Policy {
		prefixes := func(what string, most int) []netip.Prefix {
			return rapid.SliceOfNDistinct(prefixGen(), 0, most, rapid.ID[netip.Prefix]).Draw(t, what)
		}
		p := policy.Policy{Chain: chain}
		for _, d := range prefixes("destinations", 12) {
			a := rapid.SampledFrom([]policy.Action{policy.Exempt, policy.Masqueraded}).Draw(t, "action")
			p.Destinations = append(p.Destinations, policy.Entry{Prefix: d, Action: a})
		}
		for _, s := range prefixes("exempt sources", 3) {
			p.ExemptSources = append(p.ExemptSources, policy.Entry{Prefix: s, Action: policy.Exempt})
		}
		p.Sources.Value = prefixes("sources", 3)
		name := rapid.StringMatching(`[a-zA-Z0-9_.@#$%&()=,;'-]{1,14}[a-z+]`)
		p.Interfaces.Value = rapid.SliceOfNDistinct(name, 0, 3, rapid.ID[string]).Draw(t, "interfaces")
		p.Host.Value = rapid.Bool().Draw(t, "host")
		p.EnableIPv6.Value = true
		p.RandomFully.Value = rapid.Bool().Draw(t, "randomly")
		ends := rapid.SliceOfNDistinct(rapid.Uint16Min(1), 0, 6, rapid.ID[uint16]).Draw(t, "ports")
		slices.Sort(ends)
		for i := 0; i+1 < len(ends); i += 2 {
			p.ToPorts.Value = append(p.ToPorts.Value, policy.PortRange{First: ends[i], Last: ends[i+1]})
		}
		return p
	})
}

// TestApply compares what is written with what is desired, whatever rules there were
// before, and what is read with what iptables shows.
func TestApply(t *testing.T) {
	inEachVariant(t, func(n *node) {
		rapid.Check(n.T, func(t *rapid.T) {
			want := desired(policy.OwnedBy(owner), policyGen("ONE").Draw(t, "one"), policyGen("TWO").Draw(t, "two"))
			n.apply(want)
			n.holds(want)
			n.agreesWithListing("ONE", "TWO")
			n.idle("a second Apply", func() { n.apply(want) })
		})
	})
}

func TestApplyThousandPrefixes(t *testing.T) {
	inEachVariant(t, func(n *node) {
		p := basic("IP-MASQ-AGENT")
		for i := range 1000 {
			v4 := netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(i >> 8), byte(i), 0}), 24)
			v6 := netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 1, byte(i >> 8), byte(i)}), 32)
			p.Destinations = append(p.Destinations, policy.Entry{Prefix: v4, Action: policy.Exempt}, policy.Entry{Prefix: v6, Action: policy.Exempt})
		}
		want := desired(policy.OwnedBy(owner), p)
		if n.choice.Variant == netfilter.VariantNFT && !mapsEverybody(n.file("/proc/self/uid_map")) {
			// iptables-nft cannot have a larger buffer in a user namespace.
			err := n.Apply(n.Context(), want, netfilter.Observation{}, nil)
			if err == nil || !strings.Contains(err.Error(), "net.core.wmem_max") || len(n.observe(refs(want)).Chains) > 0 {
				n.Errorf("got %v", err)
			}
			return
		}
		n.apply(want)
		n.holds(want)
		n.agreesWithListing("IP-MASQ-AGENT")
		n.idle("a second Apply", func() { n.apply(want) })
	})
}

// TestApplyWritesOnlyWhatDiffers looks at the text given to iptables-restore.
func TestApplyWritesOnlyWhatDiffers(t *testing.T) {
	inEachVariant(t, func(n *node) {
		const chain = "IP-MASQ-AGENT"
		want := desired(policy.OwnedBy(owner), basic(chain))
		want.Chains = want.Chains[:1]
		n.apply(want)
		plan := func() string {
			tx, err := n.plan(n.Context(), policy.IPv4, want.Chains)
			if err != nil {
				n.Fatal(err)
			}
			return string(tx.restore())
		}
		jump := "-A POSTROUTING -m comment --comment \"" + agentJumpComment(chain) + "\" -m addrtype ! --dst-type LOCAL -j " + chain + "\n"
		n.iptables(policy.IPv4, "-D POSTROUTING 1")
		if diff := cmp.Diff("*nat\n"+jump+"COMMIT\n", plan()); diff != "" {
			n.Errorf("jump missing (-want +got):\n%s", diff)
		}
		n.apply(want)
		n.iptables(policy.IPv4, "-D "+chain+" 2")
		if got := plan(); strings.Contains(got, "POSTROUTING") || !strings.Contains(got, ":"+chain+" - [0:0]\n") {
			n.Errorf("rule missing: %s", got)
		}
		n.apply(want)
		// Of three jumps that do the same the last stays, whatever its comment.
		n.load(policy.IPv4, strings.TrimSpace(jump), `-A POSTROUTING -m comment --comment "an agent's" -m addrtype ! --dst-type LOCAL -j `+chain)
		if diff := cmp.Diff("*nat\n"+strings.Repeat(strings.Replace(jump, "-A", "-D", 1), 2)+"COMMIT\n", plan()); diff != "" {
			n.Errorf("jump thrice (-want +got):\n%s", diff)
		}
		n.apply(want)
		n.holds(want)
		if got := n.save(policy.IPv4); !strings.Contains(got, "an agent") || strings.Contains(got, agentJumpComment(chain)) {
			n.Errorf("the wrong one was deleted:\n%s", got)
		}
		// Another owner alone is a reason to write.
		other := desired(policy.OwnedBy("/elsewhere"), basic(chain))
		n.apply(other)
		n.holds(other)
	})
}

// TestContextEnds gives no time at all.
func TestContextEnds(t *testing.T) {
	inEachVariant(t, func(n *node) {
		ctx, cancel := context.WithCancel(n.Context())
		cancel()
		want := desired(policy.OwnedBy(owner), basic("X"))
		if err := n.Apply(ctx, want, netfilter.Observation{}, nil); !errors.Is(err, context.Canceled) {
			n.Errorf("Apply: %v", err)
		}
		n.apply(want)
		n.load(policy.IPv4, "-A POSTROUTING -j X") // whose deletion has to be looked up
		if err := n.Apply(ctx, want, netfilter.Observation{}, nil); !errors.Is(err, context.Canceled) {
			n.Errorf("second Apply: %v", err)
		}
	})
}
