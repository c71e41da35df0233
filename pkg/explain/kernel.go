// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
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

func newKernel(v *enforce.View, chain string) kernel {
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
		errors.Is(k.failed, enforce.ErrOtherOwner) || errors.Is(k.failed, netfilter.ErrForeign))
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
			e.found.known = r.Verdict != policy.Alien
		}
	}
	e.Kernel = e.found.known && e.found.masquerades == (e.Verdict == policy.OutcomeMasquerade)
	if !e.found.known {
		e.Problem = join(e.Problem, "a rule that is not ours comes before the one that decides")
	}
	foreign := func(a policy.AlienObject) bool { return a.Family == e.Family }
	if slices.ContainsFunc(k.group.Observed.Aliens, foreign) {
		e.Kernel, e.found.known = false, false
		e.Problem = join(e.Problem, "what else stands in the table may decide before our rules do")
	}
}

func join(problem, another string) string {
	if problem == "" {
		return another
	}
	return problem + "\n" + another
}

// lookForStrays looks for chains that no policy wants, or none wants any more, and
// that masquerade what should be left alone.
func (e *Explanation) lookForStrays(v *enforce.View, asked policy.Packet) {
	stray := func(chain string) {
		e.Kernel = false
		e.Problem = join(e.Problem, fmt.Sprintf("chain %s stands, which no policy wants, and may masquerade this traffic; "+
			"ip-masq-reconciler once removes it", chain))
	}
	for i := range v.Groups {
		g := &v.Groups[i]
		for _, c := range g.Observed.Chains {
			wanted := g.Desired.Find(c.Family, c.Name) != nil
			if c.Family == e.Family && !wanted && mayMasquerade(c, asked) {
				stray(policy.Quote(c.Name))
			}
		}
	}
	for _, o := range v.Stale {
		place := netfilter.Choice{Backend: o.Backend, Variant: o.Variant}
		seen := func(g enforce.Group) bool {
			return g.Choice.SamePlace(place) && g.Observed.Find(o.Family, o.Chain) != nil
		}
		if o.Family == e.Family && !slices.ContainsFunc(v.Groups, seen) {
			stray(o.Chain + " of " + place.String())
		}
	}
}

// mayMasquerade reports whether a chain does anything but to leave the packet
// alone. What is not known of the packet is what lets the chain do it.
func mayMasquerade(c policy.Chain, asked policy.Packet) bool {
	unknown := func(r policy.Rule) bool {
		return !asked.Src.IsValid() && r.From != nil || asked.Out == "" && r.Out != ""
	}
	reaching := policy.Chain{}
	for _, j := range c.Jumps {
		reaching.Jumps = append(reaching.Jumps, whatever(j, asked))
	}
	for _, r := range c.Rules {
		if r.Verdict != policy.Return || !unknown(r) {
			reaching.Rules = append(reaching.Rules, whatever(r, asked))
		}
	}
	r := reaching.Walk(asked)
	return r != nil && r.Verdict != policy.Return
}

// whatever returns the rule without what it asks of that which is not known.
func whatever(r policy.Rule, asked policy.Packet) policy.Rule {
	if !asked.Src.IsValid() {
		r.From = nil
	}
	if asked.Out == "" {
		r.Out = ""
	}
	return r
}
