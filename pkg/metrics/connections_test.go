// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func exempt(prefix string, n uint64) policy.Rule {
	return policy.Rule{To: policy.RangesOf(netip.MustParsePrefix(prefix)), Verdict: policy.Return, Connections: n}
}

func masquerade(n uint64) policy.Rule {
	return policy.Rule{Verdict: policy.Masquerade, Connections: n}
}

// seen returns a view of one chain.
func seen(c netfilter.Choice, rules ...policy.Rule) *enforce.State {
	return &enforce.State{Chains: []enforce.Chain{{
		Policy: policy.Policy{Chain: "A"}, Choice: c, Observed: policy.Ruleset{Chains: []policy.Chain{{Family: policy.IPv4, Name: "A", Rules: rules}}},
	}}}
}

func TestConnections(t *testing.T) {
	failed := &enforce.State{Chains: []enforce.Chain{{Policy: policy.Policy{Chain: "A"}, Err: errors.New("cannot be read")}}}
	gone := &enforce.State{}
	legacy := netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantLegacy}
	two := exempt("10.0.0.0/8", 7)
	two.To = policy.RangesOf(netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"))
	for name, test := range map[string]struct {
		views              []*enforce.State
		exempt, masquerade string
	}{
		"first sight counts in full":                {[]*enforce.State{seen(iptables, exempt("10.0.0.0/8", 5), masquerade(3))}, "5", "3"},
		"growth counts once":                        {[]*enforce.State{seen(iptables, exempt("10.0.0.0/8", 5)), seen(iptables, exempt("10.0.0.0/8", 9))}, "9", "0"},
		"a lower value begins again":                {[]*enforce.State{seen(iptables, masquerade(5)), seen(iptables, masquerade(2)), seen(iptables, masquerade(3))}, "0", "6"},
		"a rule that another program removes":       {[]*enforce.State{seen(iptables, exempt("10.0.0.0/8", 5), exempt("10.0.0.0/9", 7)), seen(iptables, exempt("10.0.0.0/8", 5))}, "12", "0"},
		"no reading changes nothing":                {[]*enforce.State{seen(iptables, masquerade(5)), nil, seen(iptables, masquerade(5))}, "0", "5"},
		"what vanished keeps its part":              {[]*enforce.State{seen(iptables, exempt("10.0.0.0/8", 5)), seen(iptables)}, "5", "0"},
		"what comes back is new":                    {[]*enforce.State{seen(iptables, masquerade(5)), gone, seen(iptables, masquerade(6))}, "0", "11"},
		"a chain that failed is not":                {[]*enforce.State{seen(iptables, masquerade(5)), failed, seen(iptables, masquerade(6))}, "0", "6"},
		"another place has other counters":          {[]*enforce.State{seen(iptables, masquerade(5)), seen(legacy, masquerade(6))}, "0", "11"},
		"elements of a set come and go":             {[]*enforce.State{seen(nftables, exempt("10.0.0.0/8", 5)), seen(nftables, two)}, "7", "0"},
		"unrecognized rules and jumps do not count": {[]*enforce.State{seen(iptables, policy.Rule{Verdict: policy.Unrecognized, Text: "x", Connections: 9}, policy.Rule{Verdict: policy.Jump, Connections: 9}, masquerade(1))}, "0", "1"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMonitor(metrics.Options{})
			for _, v := range test.views {
				m.Report(&reconcile.Report{Rules: v}, time.Minute)
			}
			expect(t, m, map[string]string{
				`connections_total{action="exempt",chain="A",family="ipv4"}`:     test.exempt,
				`connections_total{action="masquerade",chain="A",family="ipv4"}`: test.masquerade,
			})
		})
	}
}

// node is a kernel that counts, and what it has counted ever.
type node struct {
	choice netfilter.Choice
	chains map[string][]policy.Rule
	truth  map[string]uint64
}

func (n *node) view(failed string) *enforce.State {
	v := &enforce.State{}
	for _, name := range slices.Sorted(maps.Keys(n.chains)) {
		rules := n.chains[name]
		c := enforce.Chain{Policy: policy.Policy{Chain: name}, Choice: n.choice}
		if name == failed {
			c.Err = errors.New("cannot be read")
		} else {
			c.Observed.Chains = []policy.Chain{{Family: policy.IPv4, Name: name, Rules: append([]policy.Rule(nil), rules...)}}
		}
		v.Chains = append(v.Chains, c)
	}
	return v
}

// rebuild recreates a chain, or removes it.
func (n *node) rebuild(t *rapid.T, chain string) {
	delete(n.chains, chain)
	if !rapid.Bool().Draw(t, "stands") {
		return
	}
	rules := []policy.Rule{}
	if n.choice.Backend == policy.NFTables {
		rules = append(rules, policy.Rule{To: ranges(t), Verdict: policy.Return})
	} else {
		for _, i := range rapid.SliceOfNDistinct(rapid.IntRange(1, 5), 0, 4, rapid.ID[int]).Draw(t, "prefixes") {
			rules = append(rules, exempt(fmt.Sprintf("10.%d.0.0/16", i), 0))
		}
	}
	n.chains[chain] = append(rules, masquerade(0))
}

func ranges(t *rapid.T) policy.Ranges {
	var all []netip.Prefix
	for _, i := range rapid.SliceOfNDistinct(rapid.IntRange(1, 9), 1, 4, rapid.ID[int]).Draw(t, "elements") {
		all = append(all, netip.MustParsePrefix(fmt.Sprintf("10.%d.0.0/16", 2*i)))
	}
	return policy.RangesOf(all...)
}

// count lets a rule see connections.
func (n *node) count(t *rapid.T, chain string) {
	rules := n.chains[chain]
	if len(rules) == 0 {
		return
	}
	r := &rules[rapid.IntRange(0, len(rules)-1).Draw(t, "rule")]
	more := rapid.Uint64Range(1, 1000).Draw(t, "connections")
	r.Connections += more
	action := policy.ActionExempt
	if r.Verdict == policy.Masquerade {
		action = policy.ActionMasquerade
	}
	n.truth[fmt.Sprintf("ip_masq_connections_total{action=%q,chain=%q,family=\"ipv4\"}", action, chain)] += more
}

func TestTotalsNeverFallAndMissNothingThatWasRead(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := &node{
			choice: rapid.SampledFrom([]netfilter.Choice{iptables, nftables}).Draw(rt, "choice"),
			chains: map[string][]policy.Rule{}, truth: map[string]uint64{},
		}
		// Where readings come before and after each rebuild nothing is lost.
		// Else something may be, and nothing is counted twice.
		exact := rapid.Bool().Draw(rt, "exact")
		m := newMonitor(metrics.Options{})
		last := map[string]uint64{}
		read := func(failed string) {
			m.Report(&reconcile.Report{Rules: n.view(failed)}, time.Minute)
			got := scrape(t, m)
			for series, truth := range n.truth {
				// A series that was never read is not there: 0.
				total, _ := strconv.ParseFloat(got[series], 64)
				if uint64(total) < last[series] {
					rt.Fatalf("%s fell from %d to %v", series, last[series], total)
				}
				if uint64(total) > truth || exact && failed == "" && uint64(total) != truth {
					rt.Fatalf("%s is %v, counted were %d", series, total, truth)
				}
				last[series] = uint64(total)
			}
		}
		for range rapid.IntRange(1, 25).Draw(rt, "steps") {
			chain := rapid.SampledFrom([]string{"A", "B"}).Draw(rt, "chain")
			switch rapid.SampledFrom([]string{"count", "count", "read", "fail", "elements", "rebuild"}).Draw(rt, "step") {
			case "count":
				n.count(rt, chain)
			case "read":
				read("")
			case "fail":
				read(chain)
			case "elements":
				if rules := n.chains[chain]; n.choice.Backend == policy.NFTables && len(rules) > 0 {
					rules[0].To = ranges(rt)
				}
			case "rebuild":
				if exact {
					read("")
				}
				n.rebuild(rt, chain)
				if exact {
					read("")
				}
			}
		}
		read("")
	})
}

// What was counted between the last reading and a rebuild is not lost.
func TestConnectionsCountedBeforeARebuild(t *testing.T) {
	m := newMonitor(metrics.Options{})
	m.Report(&reconcile.Report{Rules: seen(iptables, masquerade(5))}, time.Minute)
	m.Report(&reconcile.Report{Before: seen(iptables, masquerade(9)), Rules: seen(iptables, masquerade(1))}, time.Minute)
	expect(t, m, map[string]string{`connections_total{action="masquerade",chain="A",family="ipv4"}`: "9"})
}

// TestBoundConnections: connections that enforceExempt binds are exempt ones that the masquerade chain does not see.
func TestBoundConnections(t *testing.T) {
	state := func(bound map[policy.ChainFamily]uint64) *enforce.State {
		s := seen(iptables, masquerade(5))
		s.Guard.Observed.Bound = bound
		return s
	}
	a := policy.ChainFamily{Chain: "A", Family: policy.IPv4}
	unread := state(nil)
	unread.Guard.Err = errors.New("cannot be read")
	m := newMonitor(metrics.Options{})
	for i, step := range []struct {
		state *enforce.State
		want  string
	}{
		{state(nil), "0"},
		{state(map[policy.ChainFamily]uint64{a: 5, {Chain: "OTHER", Family: policy.IPv4}: 3}), "5"},
		{unread, "5"},
		{state(map[policy.ChainFamily]uint64{a: 7}), "7"},
		{state(nil), "7"},
		{state(map[policy.ChainFamily]uint64{a: 8}), "15"}, // recreated
	} {
		t.Logf("step %d", i)
		m.Report(&reconcile.Report{Rules: step.state}, time.Minute)
		expect(t, m, map[string]string{
			`connections_total{action="exempt",chain="A",family="ipv4"}`: step.want, `connections_total{action="masquerade",chain="A",family="ipv4"}`: "5",
			`connections_total{action="exempt",chain="OTHER",family="ipv4"}`: "",
		})
	}
}

// TestGuardPackets: the counters of guards add up as those of connections do, also when the mode changes.
func TestGuardPackets(t *testing.T) {
	state := func(mode policy.GuardMode, packets uint64) *enforce.State {
		c := source(network("a"), "A", "10.0.0.0/8")
		c.Policy.Guard, c.Policy.PodCIDRs = mode, prefixes("10.244.0.0/16")
		s := &enforce.State{Chains: chainsIn(nftables, policy.Merge([]policy.Source{c}))}
		s.Guard = guards(s.Policies(), packets)
		return s
	}
	const counts, drops = policy.GuardCount, policy.GuardDrop
	unread := state(counts, 0)
	unread.Guard.Observed, unread.Guard.Err = netfilter.GuardObservation{}, errors.New("cannot be read")
	gone := state(counts, 0)
	gone.Guard.Observed = netfilter.GuardObservation{}
	changing := state(drops, 7)
	changing.Guard.Observed.Guards = state(counts, 7).Guard.Observed.Guards
	for name, tt := range map[string]struct {
		states      []*enforce.State
		count, drop string
	}{
		"first sight counts in full":    {[]*enforce.State{state(counts, 5)}, "5", ""},
		"growth counts once":            {[]*enforce.State{state(counts, 5), state(counts, 9)}, "9", ""},
		"a lower value begins again":    {[]*enforce.State{state(counts, 5), state(counts, 2), state(counts, 4)}, "7", ""},
		"an unread one is not new":      {[]*enforce.State{state(counts, 5), unread, state(counts, 6)}, "6", ""},
		"one that was recreated is new": {[]*enforce.State{state(counts, 5), gone, state(counts, 6)}, "11", ""},
		"the mode changes":              {[]*enforce.State{state(counts, 5), changing, state(drops, 3)}, "7", "3"},
		"off, for enforceExempt":        {[]*enforce.State{state(policy.GuardOff, 5)}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMonitor(metrics.Options{})
			for _, s := range tt.states {
				m.Report(&reconcile.Report{Rules: s}, time.Minute)
			}
			expect(t, m, map[string]string{
				`guard_packets_total{action="count",chain="A",family="ipv4"}`: tt.count, `guard_packets_total{action="drop",chain="A",family="ipv4"}`: tt.drop,
			})
		})
	}
}

// TestGuardActive: chains without a key have no series.
func TestGuardActive(t *testing.T) {
	a, b, c := source(network("a"), "A"), source(network("b"), "B"), source(network("c"), "C")
	b.Policy.StaleConnections, c.Policy.EnforceExempt = policy.ResetConnections, new(true)
	c.Policy.EnableIPv6, c.Policy.SourceCIDRs = c.Policy.EnforceExempt, prefixes("10.0.0.0/8")
	d := source(network("d"), "D")
	d.Policy.Guard, d.Policy.PodCIDRs = policy.GuardDrop, prefixes("10.0.0.0/8")
	s := &enforce.State{Chains: chainsIn(nftables, policy.Merge([]policy.Source{a, b, c, d}))}
	s.Guard.Desired = policy.DesiredGuards(s.Policies(), policy.Owner{})
	s.Guard.Diff = policy.Diff{{Kind: policy.GuardChange, Family: policy.IPv4, Chain: "D"}} // and it could not be repaired
	s.Guard.Inactive = []enforce.Inactive{{ChainFamily: policy.ChainFamily{Chain: "B", Family: policy.IPv4}, Err: errors.New("no ranges")}}
	m := newMonitor(metrics.Options{})
	m.Report(&reconcile.Report{Rules: s}, time.Minute)
	expect(t, m, map[string]string{
		`guard_active{chain="A",family="ipv4"}`: "", `guard_active{chain="B",family="ipv4"}`: "0", `guard_active{chain="C",family="ipv4"}`: "1",
		`guard_active{chain="C",family="ipv6"}`:            "", // nothing is in scope
		`guard_active{chain="D",family="ipv4"}`:            "0",
		`connections_reset_total{chain="A",family="ipv4"}`: "", `connections_reset_total{chain="B",family="ipv4"}`: "0", `connections_reset_total{chain="C",family="ipv4"}`: "",
	})
	m.ConnectionsReset(map[policy.ChainFamily]uint64{{Chain: "B", Family: policy.IPv4}: 4}, errors.New("interrupted")) // on record
	expect(t, m, map[string]string{`connections_reset_total{chain="B",family="ipv4"}`: "0", "connection_reset_failures_total": "1"})
}

// TestConnectionsReset: the record has the numbers of all programs. The counter never falls.
func TestConnectionsReset(t *testing.T) {
	b := policy.ChainFamily{Chain: "B", Family: policy.IPv4}
	var rec store.Record
	var unreadable error
	m := newMonitor(metrics.Options{Record: func() (store.Record, error) { return rec, unreadable }})
	m.Report(&reconcile.Report{Rules: &enforce.State{}}, time.Minute)
	for i, step := range []struct {
		recorded   uint64 // 0: nothing is on record
		unreadable error
		unwritable uint64 // deleted by this program, which cannot write the record
		want       string
	}{
		{0, nil, 0, ""},
		{5, nil, 0, "5"}, // older than this process
		{12, nil, 0, "12"},
		{0, errors.New("damaged"), 0, "12"},
		{13, nil, 0, "13"},
		{13, nil, 4, "17"},
		{0, nil, 0, "17"},
		{2, nil, 0, "17"}, // it began at 0
		{4, nil, 0, "19"},
	} {
		rec.Deleted, unreadable = nil, step.unreadable
		if step.recorded > 0 {
			rec.Deleted = []store.Deleted{{ChainFamily: b, Connections: step.recorded}}
		}
		if step.unwritable > 0 {
			m.ConnectionsReset(map[policy.ChainFamily]uint64{b: step.unwritable}, &enforce.UnwritableError{Err: errors.New("read-only")})
		}
		t.Logf("step %d", i)
		expect(t, m, map[string]string{`connections_reset_total{chain="B",family="ipv4"}`: step.want})
	}
	m.Report(&reconcile.Report{Problems: []reconcile.Problem{{Reason: reconcile.ReasonStandby, Err: errors.New("standby")}}}, time.Minute)
	rec.Deleted = []store.Deleted{{ChainFamily: b, Connections: 9}}
	expect(t, m, map[string]string{`connections_reset_total{chain="B",family="ipv4"}`: "19"}) // the active reconciler counts it
}
