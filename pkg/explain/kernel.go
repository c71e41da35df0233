// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// finding is what the rules in the kernel do with a packet.
type finding struct {
	known       bool // they could be read
	masquerades bool
	nftables    bool
}

// kernel is what was read of the kernel about one chain.
type kernel struct {
	group  *enforce.Group // nil where nobody could look
	failed error
}

func newKernel(v *enforce.State, chain string) kernel {
	k := kernel{failed: v.Failed[chain]}
	for i := range v.Groups {
		named := func(c policy.Chain) bool { return c.Name == chain }
		if slices.ContainsFunc(v.Groups[i].Desired.Chains, named) {
			k.group = &v.Groups[i]
		}
	}
	return k
}

// readable reports whether what was read of the chain is whole. Rules that may not
// be touched were read all the same.
func (k kernel) readable() bool {
	return k.group != nil && (k.failed == nil || errors.Is(k.failed, enforce.ErrNewer) ||
		errors.Is(k.failed, enforce.ErrOtherDataDir) || errors.Is(k.failed, netfilter.ErrNotOwned))
}

// ask notes what the kernel does with the packet, and how the chain differs.
func (e *Explanation) ask(k kernel, pkt policy.Packet) {
	if k.failed != nil {
		e.Problem = k.failed.Error()
	}
	if k.group != nil {
		e.Backend = k.group.Choice.String()
		e.found.nftables = k.group.Choice.Backend == policy.NFTables
		for _, c := range k.group.Diff {
			if c.Family == e.Family && (c.Chain == e.Chain || c.Chain == "") {
				e.Drift = append(e.Drift, c.String())
			}
		}
	}
	if !k.readable() {
		if e.Problem == "" {
			e.Problem = "the rules of the chain were not read"
		}
		return
	}
	e.found.known = true
	if c := k.group.Observed.Find(e.Family, e.Chain); c != nil {
		if r := c.Walk(pkt); r != nil {
			e.Rule = r.String()
			e.found.masquerades = r.Verdict == policy.Masquerade
			e.found.known = r.Verdict != policy.Unrecognized
		}
	}
	e.Kernel = e.found.known && e.found.masquerades == (e.Verdict == policy.OutcomeMasquerade)
	if !e.found.known {
		e.Problem = join(e.Problem, "a rule that is not ours comes before the one that decides")
	}
	foreign := func(a policy.UnrecognizedObject) bool { return a.Family == e.Family }
	if slices.ContainsFunc(k.group.Observed.Unrecognized, foreign) {
		e.Kernel, e.found.known = false, false
		e.byHand = !e.found.nftables // table nat of iptables is every program's
		e.Problem = join(e.Problem, "what else stands in the table may decide before our rules do")
	}
}

func join(problem, another string) string {
	if problem == "" {
		return another
	}
	return problem + "\n" + another
}

// override notes which third-party rule decides before the chains of the policies
// do, and otherwise. So does a chain that no policy asks for any more.
func (e *Explanation) override(q Question, v *enforce.State) {
	if q.Trace == nil {
		return
	}
	t := thirdparty.Traffic{To: q.Destination}
	if q.Interface != "" {
		t.Out = []string{q.Interface}
	}
	local := q.packet().SrcLocal
	if q.Source.IsValid() {
		t.From, t.FromLocal = policy.RangesOf(netip.PrefixFrom(q.Source, q.Source.BitLen())), &local
	}
	for _, p := range v.Policies {
		if p.Chain != e.Chain {
			continue
		}
		if t.From == nil {
			t.From = p.Candidates(e.Family)
		}
		if t.Out == nil {
			t.Out = p.Interfaces.Value
		}
	}
	hits, err := q.Trace(t, e.binding(v))
	if err != nil {
		e.Kernel = false
		e.Problem = join(e.Problem, fmt.Sprintf("third-party rules may decide, and could not all be read: %v", err))
	}
	var maybe []thirdparty.Hit
	for _, h := range hits {
		switch overrides := e.Verdict != policy.OutcomeMasquerade || h.Action != thirdparty.Masquerades; {
		case overrides && h.Sure:
			e.overriders = append(e.overriders, h)
		case overrides:
			maybe = append(maybe, h)
		case e.Kernel && h.Sure && len(e.overriders)+len(maybe) == 0:
			e.Rule = h.Text // to the same effect, and earlier
		}
	}
	if e.overriders = append(e.overriders, maybe...); len(e.overriders) == 0 {
		return
	}
	e.Kernel, e.OverriddenBy = false, e.overriders[0].Text
}

// binding tells of a chain whether it is one of the policies', and of that whether
// it masquerades the traffic.
func (e *Explanation) binding(v *enforce.State) func(thirdparty.Place) (owned, binds bool) {
	const iptablesTable, nftablesTable, nftablesPrefix = "nat", "ip-masq", "masq-"
	binds := map[string]bool{}
	for _, one := range append([]Explanation{*e}, e.Chains...) {
		binds[one.Chain] = one.found.masquerades
	}
	return func(p thirdparty.Place) (bool, bool) {
		for _, g := range v.Groups {
			table, prefix := iptablesTable, ""
			if g.Choice.Backend == policy.NFTables {
				table, prefix = nftablesTable, nftablesPrefix
			}
			name, named := strings.CutPrefix(p.Chain, prefix)
			if named && p.Table == table && p.Backend == g.Choice.Backend && p.Variant == g.Choice.Variant && g.Desired.Find(p.Family, name) != nil {
				return true, binds[name]
			}
		}
		return false, false
	}
}
