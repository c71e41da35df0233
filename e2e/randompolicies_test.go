// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"go4.org/netipx"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestRandomPolicies applies random policies to one node, one after another, and sends packets to the boundaries of
// their prefixes. It compares the observed source addresses with Policy.Decide, which tests of package policy compare
// with an oracle. The rules are written without a plugin process per policy; the packets are real.
func TestRandomPolicies(t *testing.T) {
	t.Parallel()
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, f)
			backend := n.openBackend(t)
			var pods []*topology.Host
			for _, addrs := range [][]string{{"172.20.0.5", "fd00:77::5"}, {"100.64.7.7", "2001:db8:77::7"}} {
				a, b := netip.MustParseAddr(addrs[0]), netip.MustParseAddr(addrs[1])
				pods = append(pods, n.AddPod(t, "from-"+a.String(), a, b))
			}
			probes, masqueraded := 0, 0
			rapid.Check(t, func(rt *rapid.T) {
				p := randomPolicy().Draw(rt, "policy")
				assert.NoError(rt, n.Node.Do(func() error { return apply(t.Context(), backend, p, n.dataDir) }))
				destinations := n.boundaryAddresses(rt, p)
				for _, pod := range pods {
					seen := assert.Must(pod.SweepUDP(destinations, topology.FromPort(n.nextPort())))(rt)
					for to, source := range seen {
						own, remote, out := sender{addrs: pod.Addrs}.addr(to.Addr()), n.Outside, "outside"
						if to.Addr().IsPrivate() { // the topology routes it to the LAN
							remote, out = n.LAN, "lan"
						}
						d := p.Decide(policy.Packet{Src: own, Dst: to.Addr(), Out: out, Protocol: "udp"})
						want := own
						if d.Action == policy.ActionMasquerade {
							want = n.NodeAddr(remote, to.Addr())
							masqueraded++
						}
						if probes++; source.Addr() != want {
							rt.Fatalf("from %s to %s: came from %s, want %s: %s\n%s", own, to.Addr(), source.Addr(), want, d.Reason, n.rules(t))
						}
					}
				}
			})
			t.Logf("%d probes, %d masqueraded", probes, masqueraded)
			if few := probes / 10; masqueraded < few || probes-masqueraded < few {
				t.Errorf("the policies are too similar: of %d probes %d were masqueraded", probes, masqueraded)
			}
		})
	}
}

// openBackend opens the backend of the node, as the plugin does.
func (n *node) openBackend(t *testing.T) (b netfilter.Backend) {
	t.Helper()
	direct := nftables.New()
	t.Cleanup(func() { must(t, direct.Close()) })
	drivers := netfilter.Drivers{iptables.New(n.path), direct}
	must(t, n.Node.Do(func() error {
		choice, err := drivers.Choose(t.Context(), policy.DefaultChain, policy.Backend(n.backend.setting), "", func(netfilter.Choice) error { return nil })
		if err == nil && choice.Variant != n.backend.variant {
			err = fmt.Errorf("chose %s on a node with %s", choice, n.backend.name)
		}
		if err == nil {
			b, err = drivers.Open(choice)
		}
		return err
	}))
	return b
}

// apply writes a policy as the plugin does, then reads the rules back and compares them with the desired ones.
func apply(ctx context.Context, backend netfilter.Backend, p policy.Policy, dataDir string) error {
	desired := policy.Desired([]policy.Policy{p}, backend.Layout(), policy.OwnedBy(dataDir))
	refs := []policy.ChainFamily{{Chain: p.Chain, Family: policy.IPv4}, {Chain: p.Chain, Family: policy.IPv6}}
	if err := backend.Apply(ctx, desired, netfilter.Observation{}, nil); err != nil {
		return err
	}
	if desired.Find(policy.IPv6, p.Chain) == nil { // of the policy before
		if err := backend.Remove(ctx, refs[1:], nil); err != nil {
			return err
		}
	}
	observed, err := backend.Observe(ctx, refs)
	if diff := policy.Compare(desired, observed.Rules); err == nil && len(diff) > 0 {
		err = fmt.Errorf("the rules read back differ from those applied:\n%s", diff)
	}
	return err
}

// randomPolicy draws the policy of one or two networks.
func randomPolicy() *rapid.Generator[policy.Policy] {
	from := policytest.Any()
	from.Chain, from.Prefix = rapid.Just(policy.DefaultChain), nearbyPrefix
	from.Interface = rapid.SampledFrom([]string{"lan", "outside", "l+", "out+", "outsid", "o+", "eth0"})
	from.Ports = rapid.Just(policy.Ports{{First: 1024, Last: 65535}}) // two pods send to one destination
	return rapid.Custom(func(t *rapid.T) policy.Policy {
		var sources []policy.Source
		for i := range rapid.IntRange(1, 2).Draw(t, "networks") {
			s := from.SourcePolicy(t)
			if rapid.IntRange(0, 3).Draw(t, "scoped") > 0 {
				s.SourceCIDRs, s.OutputInterfaces, s.NonMasqueradeSourceCIDRs = nil, nil, nil
			}
			sources = append(sources, policy.Source{ID: networkID(fmt.Sprint(i)), Policy: s, Order: int64(i)})
		}
		return policy.Merge(sources)[0]
	})
}

// nearbyPrefix draws prefixes that are nested, adjacent or disjoint: known ones, and wider and narrower ones at their
// ends.
func nearbyPrefix(f policy.Family) *rapid.Generator[netip.Prefix] {
	known := prefixes("0.0.0.0/0", "128.0.0.0/1", "10.0.0.0/8", "172.16.0.0/12", "172.20.0.0/16", "172.20.0.5/32", "192.168.0.0/16",
		"100.64.0.0/10", "169.254.0.0/16", "1.2.3.0/24", "255.255.255.254/32")
	if f == policy.IPv6 {
		known = prefixes("::/0", "8000::/1", "fd00::/8", "fd00:77::/64", "2001:db8::/32", "2001:db8:5::/48", "2001:db8:77::7/128", "fe80::/10")
	}
	return rapid.Custom(func(t *rapid.T) netip.Prefix {
		p := rapid.SampledFrom(known).Draw(t, "known")
		a := rapid.SampledFrom([]netip.Addr{p.Addr(), netipx.PrefixLastIP(p)}).Draw(t, "end")
		bits := p.Bits() + rapid.IntRange(-3, a.BitLen()/3).Draw(t, "more bits")
		return netip.PrefixFrom(a, min(max(bits, 0), a.BitLen())).Masked()
	})
}

// boundaryAddresses returns the first and last addresses of some of a policy's prefixes and the addresses next to
// them, those that are routable.
func (n *node) boundaryAddresses(t *rapid.T, p policy.Policy) (all []netip.AddrPort) {
	of := prefixes("10.0.0.0/8", "fd00::/8", "2001:db8::/32")
	for _, e := range p.Destinations {
		of = append(of, e.Prefix)
	}
	for _, prefix := range rapid.SliceOfN(rapid.SampledFrom(of), 1, 8).Draw(t, "boundaries of") {
		first, last := prefix.Addr(), netipx.PrefixLastIP(prefix)
		for _, a := range []netip.Addr{first, last, first.Prev(), last.Next()} {
			if to := netip.AddrPortFrom(a, topology.EchoPort); n.Routable(a) && !slices.Contains(all, to) {
				all = append(all, to)
			}
		}
	}
	return all
}
