// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// nodeRoutes are the routes of a test: the local addresses, and one output interface.
type nodeRoutes struct {
	local []netip.Addr
	out   string
	asked int
}

func (r *nodeRoutes) IsLocal(a netip.Addr) bool { return slices.Contains(r.local, a) }

func (r *nodeRoutes) OutputInterface(_, _ netip.Addr) string {
	r.asked++
	return r.out
}

func conn(src, dst, replySrc, replyDst string) *policy.Connection {
	return &policy.Connection{Src: addr(src), Dst: addr(dst), ReplySrc: addr(replySrc), ReplyDst: addr(replyDst)}
}

// TestJudgeRoutes: outputInterfaces decide, and a route is looked up for nothing that they cannot change.
func TestJudgeRoutes(t *testing.T) {
	p := policy.SourcePolicy{PodCIDRs: cidrs("10.88.0.0/16"), StaleConnections: policy.ResetConnections, NonMasqueradeCIDRs: cidrs()}
	eth, exempt := p, p
	eth.OutputInterfaces = []string{"eth+"}
	exempt.OutputInterfaces, exempt.NonMasqueradeCIDRs = eth.OutputInterfaces, cidrs("192.0.2.0/24")
	judge := func(now, before policy.SourcePolicy) *policy.ConnectionJudge {
		return policy.NewConnectionJudge([]policy.Policy{mergeOne(t, network("a", 1, now))},
			[][]policy.Policy{{mergeOne(t, network("a", 1, before))}}, false)
	}
	plain := conn("10.88.0.2", "192.0.2.1", "192.0.2.1", "10.88.0.2")
	translated := conn("10.88.0.2", "192.0.2.1", "192.0.2.1", "203.0.113.1")
	for name, tt := range map[string]struct {
		now, before policy.SourcePolicy
		*policy.Connection
		out   string
		stale bool
		asked int
	}{
		"in scope, now masqueraded": {eth, exempt, plain, "eth1", true, 1},
		"in scope, now exempt":      {exempt, eth, translated, "eth1", true, 1},
		"in scope, as it is now":    {eth, exempt, translated, "eth1", false, 1},
		"out of scope":              {exempt, eth, translated, "wg0", false, 1},
		"not known":                 {exempt, eth, translated, "", false, 1},
		"unchanged":                 {eth, eth, plain, "eth1", false, 0},
		"unchanged, translated":     {eth, eth, translated, "wg0", false, 0},
		"scope narrowed":            {eth, p, translated, "wg0", false, 1},
		"scope widened":             {p, eth, plain, "wg0", true, 1},
		"scope widened, in scope":   {p, eth, plain, "eth1", false, 1},
	} {
		routes := &nodeRoutes{out: tt.out}
		if _, stale := judge(tt.now, tt.before).Judge(tt.Connection, routes); stale != tt.stale || routes.asked != tt.asked {
			t.Errorf("%s: stale %v, %d routes looked up, want %v, %d", name, stale, routes.asked, tt.stale, tt.asked)
		}
	}
}

// staleByDefinition is the contract's wording, decided by Policy.Decide.
func staleByDefinition(c policy.Connection, now []policy.Policy, before [][]policy.Policy, untranslated bool, r *nodeRoutes) (chains []string) {
	f := policy.FamilyOf(c.Src)
	holds := func(p policy.Policy) bool { return p.PodRanges(f).Contains(c.Src) }
	var reset []string
	for _, p := range now {
		if p.ResetsConnections() {
			if reset = append(reset, p.Chain); holds(p) {
				chains = append(chains, p.Chain)
			}
		}
	}
	for _, policies := range before {
		for _, p := range policies {
			exists := slices.ContainsFunc(now, func(q policy.Policy) bool { return q.Chain == p.Chain })
			switch {
			case !holds(p):
			case slices.Contains(reset, p.Chain):
				chains = append(chains, p.Chain)
			case !exists && len(reset) > 0: // it has another name now
				chains = append(chains, reset[0])
			}
		}
	}
	decide := func(p policy.Policy, out string) policy.Action {
		return p.Decide(policy.Packet{Src: c.Src, Dst: c.ReplySrc, Out: out}).Action
	}
	masqueraded := func(policies []policy.Policy) bool {
		return slices.ContainsFunc(policies, func(p policy.Policy) bool { return decide(p, r.out) == policy.ActionMasquerade })
	}
	anyScope := func(p policy.Policy) bool { return len(p.Interfaces.Value) > 0 }
	if r.IsLocal(c.Src) || r.IsLocal(c.ReplySrc) {
		return nil
	}
	scoped := slices.ContainsFunc(now, anyScope) ||
		slices.ContainsFunc(before, func(b []policy.Policy) bool { return slices.ContainsFunc(b, anyScope) })
	if scoped {
		inScope := func(p policy.Policy) bool { return decide(p, r.out) != policy.ActionOutOfScope }
		// Out "" is any interface in scope.
		sourceInScope := func(p policy.Policy) bool { return decide(p, "") != policy.ActionOutOfScope }
		if r.out == "" || slices.ContainsFunc(now, sourceInScope) && !slices.ContainsFunc(now, inScope) {
			return nil
		}
	}
	translated, verdict := c.ReplyDst != c.Src, masqueraded(now)
	if translated == verdict || translated && c.ReplySrc != c.Dst {
		return nil
	}
	if untranslated && !translated {
		return chains
	}
	if slices.ContainsFunc(before, func(b []policy.Policy) bool { return masqueraded(b) != verdict }) {
		return chains
	}
	return nil
}

// TestJudgeOfRandomChanges compares the judge with the definition for random policies before and after a change.
func TestJudgeOfRandomChanges(t *testing.T) {
	found, oneKind := map[bool]int{}, 0
	rapid.Check(t, func(t *rapid.T) {
		f := genFamily().Draw(t, "family")
		sources := genSources().Draw(t, "before")
		now := slices.Clone(sources)
		for i := range now {
			s := &now[i].Policy
			switch rapid.IntRange(0, 6).Draw(t, "change") {
			case 0:
				s.Chain = "OTHER"
			case 1, 2:
				chain := s.Chain
				*s = genSourcePolicy().Draw(t, "policy")
				s.Chain = chain
			case 3:
				s.SourceCIDRs = cidrs()
			case 4:
				s.NonMasqueradeSourceCIDRs = append(slices.Clone(s.NonMasqueradeSourceCIDRs), genPrefix(f).Draw(t, "exempt source"))
			}
		}
		add := func(sources []policy.Source) {
			for i := range sources {
				s := &sources[i].Policy
				s.StaleConnections = rapid.SampledFrom([]policy.StaleConnections{policy.ResetConnections, policy.ResetConnections, policy.KeepConnections}).Draw(t, "staleConnections")
				s.PodCIDRs = genPrefixes([]policy.Family{f}, 2).Draw(t, "podCIDRs")
			}
		}
		add(sources)
		add(now)
		resets := [][]policy.Policy{merge(sources)}
		if rapid.Bool().Draw(t, "second change") {
			resets = append(resets, merge(genSources().Draw(t, "first")))
		}
		untranslated := rapid.Bool().Draw(t, "untranslated")
		present := merge(now)
		judge := policy.NewConnectionJudge(present, resets, untranslated)
		same := policy.NewConnectionJudge(present, [][]policy.Policy{present}, false)
		for range 20 {
			one := func(name string) netip.Addr { return lowAddress(f, rapid.IntRange(0, 15).Draw(t, name)) }
			c := policy.Connection{Src: one("src"), Dst: one("dst")}
			c.ReplySrc, c.ReplyDst = c.Dst, c.Src
			if rapid.IntRange(0, 3).Draw(t, "DNAT") == 0 {
				c.ReplySrc = one("endpoint")
			}
			if rapid.Bool().Draw(t, "translated") {
				c.ReplyDst = one("translated")
			}
			routes := &nodeRoutes{
				local: []netip.Addr{one("local")},
				out:   rapid.SampledFrom([]string{"eth0", "eth1", "wg0", ""}).Draw(t, "out"),
			}
			want := staleByDefinition(c, present, resets, untranslated, routes)
			chain, stale := judge.Judge(&c, routes)
			if stale != (len(want) > 0) || stale && chain != want[0] {
				t.Fatalf("%+v out %q: stale %v of %q, want %v", c, routes.out, stale, chain, want)
			}
			found[stale]++
			isTranslated := c.ReplyDst != c.Src
			mayTranslated, mayUntranslated := judge.StaleKinds()
			if stale && (isTranslated && !mayTranslated || !isTranslated && !mayUntranslated) {
				t.Fatalf("%+v: stale, but translated entries %v, untranslated entries %v", c, mayTranslated, mayUntranslated)
			}
			if mayTranslated != mayUntranslated {
				oneKind++
			}
			// Whatever the policies are, the same ones before and now make nothing stale.
			if _, stale := same.Judge(&c, routes); stale {
				t.Fatalf("%+v: stale although nothing changed", c)
			}
		}
	})
	if all := found[true] + found[false]; found[true] < all/100 || oneKind < all/20 {
		t.Errorf("of %d entries %d were stale, and entries of one kind alone could be for %d", all, found[true], oneKind)
	}
}

// TestLeft: what is translated to an address that left the node is stale, and nothing else.
func TestLeft(t *testing.T) {
	j := policy.NewConnectionJudge(nil, nil, false)
	j.AddLeft("A", addr("203.0.113.1"))
	for name, tt := range map[string]struct {
		*policy.Connection
		stale bool
	}{
		"translated to it":      {conn("10.88.0.2", "192.0.2.1", "192.0.2.1", "203.0.113.1"), true},
		"translated to another": {conn("10.88.0.2", "192.0.2.1", "192.0.2.1", "203.0.113.2"), false},
		"exempt":                {conn("10.88.0.2", "192.0.2.1", "192.0.2.1", "10.88.0.2"), false},
		"the node's own":        {conn("203.0.113.1", "192.0.2.1", "192.0.2.1", "203.0.113.1"), false},
		"inbound":               {conn("192.0.2.1", "203.0.113.1", "10.88.0.2", "192.0.2.1"), false},
	} {
		if chain, stale := j.Judge(tt.Connection, &nodeRoutes{}); stale != tt.stale || stale && chain != "A" {
			t.Errorf("%s: stale %v of chain %q", name, stale, chain)
		}
	}
	if translated, untranslated := j.StaleKinds(); !translated || untranslated || !slices.Equal(j.Families(), []policy.Family{policy.IPv4}) {
		t.Errorf("families %v, translated %v, untranslated %v", j.Families(), translated, untranslated)
	}
}

// TestPassed: a connection of an address that passed to another pod is stale if it contradicts the verdict of the
// present pod, unless the node has the address. Others may be of the present pod, if the walk comes late.
func TestPassed(t *testing.T) {
	const masqueraded, exempt, local = "10.88.0.2", "10.88.0.3", "192.0.2.9"
	p := policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8"), NonMasqueradeNamespaces: []string{"prod"}}
	now := mergeOne(t, network("a", 1, p))
	now.SetExemptPods([]policy.ExemptPod{{Address: addr(exempt), Namespace: "prod"}})
	j := policy.NewConnectionJudge([]policy.Policy{now}, nil, false)
	for _, a := range []string{masqueraded, exempt, local} {
		j.AddPassed("A", addr(a))
	}
	const node, service = "203.0.113.1", "10.96.0.1"
	routes := &nodeRoutes{local: []netip.Addr{addr(local), addr(node)}}
	for name, tt := range map[string]struct {
		*policy.Connection
		stale bool
	}{
		"to a masqueraded destination":             {conn(masqueraded, "192.0.2.1", "192.0.2.1", masqueraded), true},
		"to a masqueraded destination, translated": {conn(masqueraded, "192.0.2.1", "192.0.2.1", node), false},
		"to an exempt destination":                 {conn(masqueraded, "10.9.0.1", "10.9.0.1", masqueraded), false},
		"to an exempt destination, translated":     {conn(masqueraded, "10.9.0.1", "10.9.0.1", node), true},
		"to a Service":                             {conn(masqueraded, service, "192.0.2.1", masqueraded), true},
		"to a Service, translated":                 {conn(masqueraded, service, "192.0.2.1", node), false},
		"to a Service of pods":                     {conn(masqueraded, service, "10.88.7.1", masqueraded), false},
		"to a Service of pods, translated":         {conn(masqueraded, service, "10.88.7.1", node), true},
		"to a Service of the node":                 {conn(masqueraded, service, node, masqueraded), false},
		"exempt pod":                               {conn(exempt, "192.0.2.1", "192.0.2.1", exempt), false},
		"exempt pod, translated":                   {conn(exempt, "192.0.2.1", "192.0.2.1", node), true},
		"exempt pod, to a Service":                 {conn(exempt, service, "192.0.2.1", exempt), false},
		"exempt pod, to a Service, translated":     {conn(exempt, service, "192.0.2.1", node), true},
		"of another":                               {conn("10.88.0.4", "192.0.2.1", "192.0.2.1", "10.88.0.4"), false},
		"to the address":                           {conn("192.0.2.1", masqueraded, masqueraded, "192.0.2.1"), false},
		"the node's own":                           {conn(local, "192.0.2.1", "192.0.2.1", local), false},
		"the node's own, translated":               {conn(local, "192.0.2.1", "192.0.2.1", node), false},
		"inbound to the node":                      {conn("192.0.2.1", local, local, "192.0.2.1"), false},
	} {
		chain, stale := j.Judge(tt.Connection, routes)
		if stale != tt.stale || stale && chain != "A" {
			t.Errorf("%s: stale %v of chain %q, want %v", name, stale, chain, tt.stale)
		}
	}
}

// TestPassedOfRandomPolicies compares the judge with Policy.Decide for connections of an address that passed to another
// pod: those are stale that are translated and not masqueraded, or the reverse.
func TestPassedOfRandomPolicies(t *testing.T) {
	found := map[bool]int{}
	rapid.Check(t, func(t *rapid.T) {
		f := genFamily().Draw(t, "family")
		present := merge(genSources().Draw(t, "sources"))
		j := policy.NewConnectionJudge(present, nil, false)
		for range 20 {
			one := func(name string) netip.Addr { return lowAddress(f, rapid.IntRange(0, 15).Draw(t, name)) }
			c := policy.Connection{Src: one("src"), Dst: one("dst"), ReplySrc: one("endpoint")}
			c.ReplyDst = rapid.SampledFrom([]netip.Addr{c.Src, one("translated")}).Draw(t, "reply")
			j.AddPassed("A", c.Src)
			routes := &nodeRoutes{
				local: []netip.Addr{one("local")},
				out:   rapid.SampledFrom([]string{"eth0", "eth1", "wg0", ""}).Draw(t, "out"),
			}
			// Decide takes "" for the first interface in scope.
			p := policy.Packet{Src: c.Src, Dst: c.ReplySrc, Out: routes.out, DstLocal: routes.IsLocal(c.ReplySrc)}
			isMasqueraded := slices.ContainsFunc(present, func(q policy.Policy) bool {
				return q.Decide(p).Action == policy.ActionMasquerade
			})
			want := !routes.IsLocal(c.Src) && isMasqueraded != (c.ReplyDst != c.Src)
			_, stale := j.Judge(&c, routes)
			if stale != want {
				t.Fatalf("%+v, out %q: stale %v, want %v", c, routes.out, stale, want)
			}
			found[stale]++
		}
	})
	if found[true] == 0 || found[false] == 0 {
		t.Errorf("stale entries and others: %v", found)
	}
}

// TestPassedByRoute: outputInterfaces decide whether a connection contradicts the verdict of the present pod. Without a
// route the chain counts as one that masquerades, if it does so by some interface.
func TestPassedByRoute(t *testing.T) {
	p := policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("192.0.2.0/24"), OutputInterfaces: []string{"eth+"}}
	j := policy.NewConnectionJudge([]policy.Policy{mergeOne(t, network("a", 1, p))}, nil, false)
	j.AddPassed("A", addr("10.88.0.2"))
	masqueraded := conn("10.88.0.2", "198.51.100.1", "198.51.100.1", "203.0.113.1")
	exempt := conn("10.88.0.2", "192.0.2.1", "192.0.2.1", "203.0.113.1")
	untranslated := conn("10.88.0.2", "198.51.100.1", "198.51.100.1", "10.88.0.2")
	exemptUntranslated := conn("10.88.0.2", "192.0.2.1", "192.0.2.1", "10.88.0.2")
	for name, tt := range map[string]struct {
		*policy.Connection
		out   string
		stale bool
	}{
		"in scope":                       {masqueraded, "eth1", false},
		"out of scope":                   {masqueraded, "wg0", true},
		"no route":                       {masqueraded, "", false},
		"no route, exempt":               {exempt, "", true},
		"no route, untranslated":         {untranslated, "", true},
		"in scope, untranslated":         {untranslated, "eth1", true},
		"out of scope, untranslated":     {untranslated, "wg0", false},
		"in scope, to the exempt":        {exempt, "eth1", true},
		"no route, exempt, untranslated": {exemptUntranslated, "", false},
	} {
		_, stale := j.Judge(tt.Connection, &nodeRoutes{out: tt.out})
		if stale != tt.stale {
			t.Errorf("%s: stale %v, want %v", name, stale, tt.stale)
		}
	}
}
