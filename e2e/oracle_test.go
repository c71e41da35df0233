// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"flag"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var seed = flag.Uint64("seed", 20260801, "of the random policies and changes")

// TestRandomPoliciesAgainstOracle applies random policies to one node, one after another, and
// sends packets to the boundaries of their prefixes. It compares the observed source addresses with
// an oracle that shares no code with the packages under test. The rules are written without a
// plugin process per policy; the packets are real.
func TestRandomPoliciesAgainstOracle(t *testing.T) {
	t.Parallel()
	policies := map[string]int{"nftables": 200, "iptables-nft": 200, "iptables-legacy": 60}
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			t.Logf("-seed %d", *seed)
			n := newNode(t, f)
			w := oracleNode{node: n, random: rand.New(rand.NewPCG(*seed, 0)), backend: n.openBackend(t)}
			for _, addrs := range [][]string{{"172.20.0.5", "fd00:77::5"}, {"100.64.7.7", "2001:db8:77::7"}} {
				a, b := netip.MustParseAddr(addrs[0]), netip.MustParseAddr(addrs[1])
				w.pods = append(w.pods, topology.Must(n.AddPod("from-"+a.String(), a, b))(t))
			}
			probes, masqueraded := 0, 0
			for i := range policies[f.name] {
				hits, total := w.checkRandomPolicy(t)
				probes, masqueraded = probes+total, masqueraded+hits
				if t.Failed() {
					t.Fatalf("policy %d of -seed %d; rules:\n%s", i, *seed, n.rules(t))
				}
			}
			t.Logf("%d policies, %d probes, %d masqueraded", policies[f.name], probes, masqueraded)
			if few := probes / 10; masqueraded < few || probes-masqueraded < few {
				t.Errorf("the policies are too similar: of %d probes %d were masqueraded", probes, masqueraded)
			}
		})
	}
}

// oracleNode is a node with two hosts that send through it.
type oracleNode struct {
	*node
	random  *rand.Rand
	backend netfilter.Backend
	pods    []*topology.Host
}

// backend opens the backend of the node's backend, as the plugin does.
func (n *node) openBackend(t *testing.T) netfilter.Backend {
	t.Helper()
	direct := nftables.New()
	t.Cleanup(func() {
		if err := direct.Close(); err != nil {
			t.Error(err)
		}
	})
	drivers := netfilter.Drivers{iptables.New(n.path), direct}
	var b netfilter.Backend
	err := n.Node.Do(func() error {
		choice, err := drivers.Choose(t.Context(), policy.DefaultChain, policy.Backend(n.backend.setting), func(netfilter.Choice) error { return nil })
		if err != nil {
			return err
		}
		if choice.Variant != n.backend.variant {
			t.Errorf("chose %s on a node with %s", choice, n.backend.name)
		}
		b, err = drivers.Open(choice)
		return err
	})
	must(t, err)
	return b
}

// checkRandomPolicy applies one random policy and compares packets with the oracle.
func (w *oracleNode) checkRandomPolicy(t *testing.T) (masqueraded, total int) {
	t.Helper()
	p := randomPolicy(w.random)
	sources := p.entries(w.random)
	w.apply(t, sources)
	must(t, w.Node.FlushConntrack())
	destinations := w.boundaryAddresses(p)
	for _, from := range w.pods {
		seen, err := from.SweepUDP(destinations)
		if err != nil {
			t.Errorf("%s: %v", describe(sources), err)
			return 0, 0
		}
		for to, source := range seen {
			own, remote, out := sender{addrs: from.Addrs}.addr(to.Addr()), w.Outside, "outside"
			if isPrivate(to.Addr()) {
				remote, out = w.LAN, "lan"
			}
			want, verdict := own, "kept"
			if p.masquerades(own, to.Addr(), out) {
				want, verdict = w.NodeAddr(remote, to.Addr()), "masqueraded"
				masqueraded++
			}
			if source.Addr() != want {
				t.Errorf("%s\nfrom %s to %s: came from %s, want %s (%s)", describe(sources), own, to.Addr(), source.Addr(), want, verdict)
			}
			total++
		}
	}
	return masqueraded, total
}

// apply parses, merges and writes the entries as the plugin does, then reads the rules back and
// compares them with the desired state.
func (w *oracleNode) apply(t *testing.T, sources []object) {
	t.Helper()
	var sourcePolicies []policy.Source
	for i, keys := range sources {
		text, err := json.Marshal(keys)
		must(t, err)
		entry, err := config.ReadNetconf(text).Entry()
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		sourcePolicies = append(sourcePolicies, policy.Source{
			ID: policy.SourceID{Kind: policy.Network, Name: entry.Network}, Policy: entry.Policy, Order: int64(i),
		})
	}
	merged := policy.Merge(sourcePolicies)
	if len(merged) != 1 || len(merged[0].Conflicts) > 0 {
		t.Fatalf("%s: merge returned %v", describe(sources), merged)
	}
	desired := policy.Desired(merged, w.backend.Layout(), policy.OwnedBy(w.dataDir))
	refs := []policy.ChainFamily{{Chain: policy.DefaultChain, Family: policy.IPv4}, {Chain: policy.DefaultChain, Family: policy.IPv6}}
	err := w.Node.Do(func() error {
		// A chain that is no longer desired in a family is removed, as the plugin does.
		if err := w.backend.Apply(t.Context(), desired, netfilter.Observation{}, nil); err != nil {
			return err
		}
		if desired.Find(policy.IPv6, policy.DefaultChain) == nil {
			if err := w.backend.Remove(t.Context(), refs[1:], nil); err != nil {
				return err
			}
		}
		observed, err := w.backend.Observe(t.Context(), refs)
		if diff := policy.Compare(desired, observed.Rules); err == nil && len(diff) > 0 {
			err = errors.New("the rules read back differ from those applied:\n" + diff.String())
		}
		return err
	})
	if err != nil {
		t.Fatalf("%s: %v", describe(sources), err)
	}
}

// boundaryAddresses returns the first and last addresses of random prefixes and the addresses next
// to them, up to ten routable ones in each family.
func (w *oracleNode) boundaryAddresses(p oraclePolicy) []netip.AddrPort {
	var all []netip.AddrPort
	left := map[bool]int{true: 10, false: 10} // by Is4
	prefixes := p.prefixes()
	for tries := 0; left[true]+left[false] > 0 && tries < 400; tries++ {
		prefix := prefixes[w.random.IntN(len(prefixes))]
		first, last := prefix.Addr(), lastAddr(prefix)
		for _, a := range []netip.Addr{first, last, first.Prev(), last.Next()} {
			to := netip.AddrPortFrom(a, topology.EchoPort)
			if w.Routable(a) && left[a.Is4()] > 0 && !slices.Contains(all, to) {
				all = append(all, to)
				left[a.Is4()]--
			}
		}
	}
	return all
}

func lastAddr(p netip.Prefix) netip.Addr {
	bytes := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(bytes)*8; bit++ {
		bytes[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(bytes)
	return a
}

// isPrivate reports whether the topology routes the address to the LAN.
func isPrivate(a netip.Addr) bool { return a.IsPrivate() }

func describe(sources []object) string {
	var lines []string
	for _, s := range sources {
		text, err := json.Marshal(s)
		if err != nil {
			return err.Error()
		}
		lines = append(lines, string(text))
	}
	return strings.Join(lines, "\n")
}
