// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// everywhere is a conf directory that has all networks.
type everywhere struct{}

func (everywhere) HasEntry(string) bool                          { return true }
func (everywhere) LacksEntry(string) bool                        { return false }
func (everywhere) HasEntryWith(string, policy.SourcePolicy) bool { return false }

func conflists() enforce.Conflists { return everywhere{} }
func ignored(error)                {}

// onDisk is a conf directory in which every network has this policy.
type onDisk struct {
	everywhere
	policy policy.SourcePolicy
}

func (d onDisk) HasEntryWith(_ string, s policy.SourcePolicy) bool { return d.policy.Equal(s) }

func TestPodSubnetsAreKept(t *testing.T) {
	subnets := func(list ...string) (p []netip.Prefix) {
		for _, s := range list {
			p = append(p, netip.MustParsePrefix(s))
		}
		return p
	}
	stored, other := network("net", "A"), network("other", "A")
	stored.PodSubnets, stored.Order, other.Order = subnets("10.1.2.0/24"), 1, 2
	changed := network("net", "A")
	changed.Policy.MasqueradeCIDRs = subnets("10.9.0.0/16")
	same := network("net", "A")
	from := func(s policy.Source, dir string) policy.Source {
		s.ConfDir = dir
		return s
	}
	listed := from(stored, "/etc/cni/net.d")
	listed.PodSubnets = nil
	with := func(s policy.Source, list ...string) policy.Source {
		s.PodSubnets = subnets(list...)
		return s
	}
	var many []string
	for i := range policy.MaxPodCIDRs {
		many = append(many, fmt.Sprintf("10.%d.%d.0/24", i>>8, i&255))
	}
	for name, c := range map[string]struct {
		add     policy.Source
		stale   bool
		want    []string
		order   int64
		changes int
	}{
		"plugin.toml":                       {from(same, "/etc/cni/net.d"), false, nil, 1, 1},
		"plugin.toml, and a changed policy": {from(changed, "/etc/cni/net.d"), false, nil, 3, 1},
		"unchanged":                         {with(same, "10.1.2.0/24"), false, []string{"10.1.2.0/24"}, 1, 0},
		"new subnet":                        {with(same, "10.0.3.0/24", "fd00:1::/64"), false, []string{"10.0.3.0/24", "10.1.2.0/24", "fd00:1::/64"}, 1, 1},
		"the conflist's":                    {same, false, []string{"10.1.2.0/24"}, 1, 0},
		"changed policy":                    {changed, false, []string{"10.1.2.0/24"}, 3, 1},
		"changed policy and subnet":         {with(changed, "10.0.3.0/24"), false, []string{"10.0.3.0/24", "10.1.2.0/24"}, 3, 1},
		"stale":                             {with(changed, "10.0.3.0/24"), true, []string{"10.0.3.0/24", "10.1.2.0/24"}, 1, 1},
		"too many":                          {with(same, many...), false, many, 1, 1},
		"even more":                         {with(same, append(many, "10.99.0.0/16")...), false, []string{"10.1.2.0/24"}, 1, 0},
	} {
		disk := func() enforce.Conflists { return everywhere{} }
		if c.stale {
			disk = func() enforce.Conflists { return onDisk{policy: stored.Policy} }
		}
		p := enforce.Proposal{Sources: []policy.Source{stored, other}}
		if err := p.Add(c.add, disk, ignored); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got := p.Find(stored.ID)
		assert.Equal(t, fmt.Sprintf("%s: from", name), got.ConfDir, c.add.ConfDir)
		if !slices.Equal(got.PodSubnets, subnets(c.want...)) || got.Order != c.order || len(p.Changed) != c.changes {
			t.Errorf("%s: %s, order %d, %d changed; want %s, %d, %d", name, got.PodSubnets, got.Order, len(p.Changed), c.want, c.order, c.changes)
		}
		if !slices.Equal(stored.PodSubnets, subnets("10.1.2.0/24")) {
			t.Fatalf("%s: the stored source has %s", name, stored.PodSubnets)
		}
	}
	// A document from the conflist stays one until another entry, or a subnet, is stored without a plugin.toml.
	for name, c := range map[string]struct {
		add     policy.Source
		confDir string
		changes int
	}{
		"the same":          {from(same, listed.ConfDir), listed.ConfDir, 0},
		"another directory": {from(same, "/other"), "/other", 1},
		"without the file":  {same, listed.ConfDir, 0},
		"a subnet":          {with(same, "10.0.3.0/24"), "", 1},
		"another policy":    {changed, "", 1},
	} {
		p := enforce.Proposal{Sources: []policy.Source{listed, other}}
		if err := p.Add(c.add, conflists, ignored); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := p.Find(listed.ID); got.ConfDir != c.confDir || len(p.Changed) != c.changes {
			t.Errorf("%s: from %q, %d changed", name, got.ConfDir, len(p.Changed))
		}
	}
}

// TestAddNetworks: two networks of a chain change together a value on which they must agree; of many, those with a conflict
// are left out, and the cost does not grow with the square of their number.
func TestAddNetworks(t *testing.T) {
	a, b := network("a", "A", guard(policy.GuardCount)), network("b", "A", guard(policy.GuardCount))
	p := enforce.Proposal{Sources: []policy.Source{a, b}}
	a.Policy.Guard, b.Policy.Guard = policy.GuardDrop, policy.GuardDrop
	if errs := p.AddNetworks([]policy.Source{a, b}, conflists, ignored); len(errs) > 0 || len(p.Changed) != 2 {
		t.Errorf("%v, %d changed", errs, len(p.Changed))
	}
	many := func(n int, conflicts ...int) (list []policy.Source) {
		for i := range n {
			s := network(fmt.Sprint(i), "A", guard(policy.GuardDrop))
			if slices.Contains(conflicts, i) {
				s.Policy.Guard = policy.GuardCount
			}
			list = append(list, s, network(fmt.Sprint("own ", i), fmt.Sprint("OWN", i)))
		}
		return list
	}
	errs := p.AddNetworks(many(200, 7, 107), conflists, ignored)
	if len(errs) != 2 || errs[policy.SourceID{Kind: policy.Network, Name: "7"}] == nil || len(p.Sources) != 2+2*200-2 {
		t.Errorf("%v, %d sources", errs, len(p.Sources))
	}
	allocations := func(n int) float64 {
		list := many(n)
		return testing.AllocsPerRun(1, func() { (&enforce.Proposal{}).AddNetworks(list, conflists, ignored) })
	}
	if less, more := allocations(100), allocations(400); more > 6*less { // the square is 16
		t.Errorf("%.0f allocations for 200 networks, %.0f for 800", less, more)
	}
}

// TestBesideUnreadableDocument checks what an ADD of network "own" writes while the document of another network cannot be
// read: chains that exist stay as they are, get a missing jump, and one that does not exist is created.
func TestBesideUnreadableDocument(t *testing.T) {
	drop := guard(policy.GuardDrop)
	own := network("own", "A", drop, exempts("10.0.0.0/8"))
	changed := network("own", "A", drop, exempts("10.0.0.0/8", "192.0.2.0/24"))
	other := network("other", "B", drop, exempts("172.16.0.0/12"))
	merged := network("other", "A", drop, exempts("172.16.0.0/12"))
	ruleLost := func(k *kernel) {
		for ref, c := range k.Chains[netfiltertest.IPTables] {
			if ref.Chain == "A" {
				c.Rules = c.Rules[:len(c.Rules)-1]
				k.Chains[netfiltertest.IPTables][ref] = c
			}
		}
	}
	jumpLost := func(k *kernel) {
		for ref, c := range k.Chains[netfiltertest.IPTables] {
			c.Jumps = nil
			k.Chains[netfiltertest.IPTables][ref] = c
		}
	}
	rulesLost := func(k *kernel) {
		k.reviseChains(func(_ netfilter.Choice, c *policy.Chain) {
			if c.Name == "A" {
				c.Rules = nil
			}
		})
	}
	guardsLost := func(k *kernel) { k.Guards = nil }
	const ruleA, guardA = "A: 10.0.0.0/8 all\n", "A guard: 10.0.0.0/8\n"
	const ruleB, guardB = "B: 172.16.0.0/12 all\n", "B guard: 172.16.0.0/12\n"
	gone := func(k *kernel) {
		delete(k.Chains[netfiltertest.IPTables], policy.ChainFamily{Family: policy.IPv4, Chain: "A"})
		k.Guards = slices.DeleteFunc(k.Guards, func(g policy.Guard) bool { return g.Chain == "A" })
	}
	for name, c := range map[string]struct {
		stored, own, other policy.Source
		lose               func(*kernel)
		want               string
	}{
		"nothing":                 {own, own, other, nil, ruleA + guardA + ruleB + guardB},
		"guards":                  {own, own, other, guardsLost, ruleA + ruleB},
		"the jump, merged chain":  {own, own, merged, jumpLost, "A: 172.16.0.0/12 10.0.0.0/8 all\nA guard: {10.0.0.0/8, 172.16.0.0/12}\n"},
		"a rule":                  {own, own, other, ruleLost, "A: 10.0.0.0/8\n" + guardA + ruleB + guardB},
		"a policy":                {own, changed, other, nil, ruleA + guardA + ruleB + guardB},
		"a policy, merged chain":  {own, changed, merged, nil, "A: 172.16.0.0/12 10.0.0.0/8 all\nA guard: {10.0.0.0/8, 172.16.0.0/12}\n"},
		"the chain":               {own, own, other, gone, ruleA + guardA + ruleB + guardB},
		"the rules, and a policy": {own, changed, other, rulesLost, "A: 10.0.0.0/8 192.0.2.0/24 all\nA guard: {10.0.0.0/8, 192.0.2.0/24}\n" + ruleB + guardB},
		"the chain of that source": {own, network("own", "B", drop, exempts("10.0.0.0/8")), other, nil,
			ruleA + guardA + ruleB + guardB},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.mustApply(c.stored, c.other)
			if c.lose != nil {
				c.lose(f.kernel)
			}
			lock, release := f.lock()
			defer release()
			state := store.State{Sources: []policy.Source{c.stored}, Record: f.record()}
			p := enforce.Proposal{Sources: state.Sources, Lost: []store.FileError{{}}}
			must(t, p.Add(c.own, conflists, ignored))
			for range 2 { // the second time nothing is left to do
				f.kernel.log = nil
				s, err := f.enforcer.Apply(t.Context(), lock, state, &p)
				if err = cmp.Or(err, s.Err(c.own.Policy.Chain)); err != nil || s.Differs() || !s.Exists(c.own.Policy.Chain) {
					t.Errorf("%v, diff %v", err, s.Diff())
				}
				state.Sources, state.Record, p.Changed = p.Sources, f.record(), nil
			}
			f.writes()
			var got string
			for _, chain := range []string{"A", "B"} {
				if c, exists := f.kernel.Chains[netfiltertest.IPTables][policy.ChainFamily{Family: policy.IPv4, Chain: chain}]; exists {
					got += chain + ":"
					for _, r := range c.Rules {
						switch {
						case r.To == nil:
							got += " all"
						case len(withoutMulticast(r.To)) > 0:
							got += " " + r.To.String()
						}
					}
					got += "\n"
				}
				for _, g := range f.kernel.Guards {
					if g.Chain == chain {
						got += fmt.Sprintf("%s guard: %s\n", chain, withoutMulticast(g.Exempt))
					}
				}
			}
			assert.Equal(t, "in the kernel", got, c.want)
		})
	}
}
