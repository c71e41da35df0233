// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"net/netip"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Question is about traffic to a destination.
type Question struct {
	Destination netip.Addr
	Source      netip.Addr // the zero Addr: not known
	Interface   string     // that it leaves through; "": not known
	// Local tells whether an address is one of the node's own. Nil: none is.
	Local func(netip.Addr) bool
	// Trace is thirdparty.Trace. Nil: there are no third-party rules.
	Trace func(thirdparty.Traffic, func(thirdparty.Place) (owned, binds bool)) ([]thirdparty.Hit, error)
	// Incomplete is why the documents do not say all that the rules are made from:
	// some cannot be read. Nil where they can.
	Incomplete error
}

// Explanation is what becomes of that traffic. In JSON the names of the fields
// are an interface of this program; what may be missing says so, and what is
// not known is "" there.
type Explanation struct {
	Destination netip.Addr `json:"destination"`
	Source      netip.Addr `json:"source"`
	Interface   string     `json:"interface"`

	Chain   string         `json:"chain"` // "" where nothing is managed
	Family  policy.Family  `json:"family"`
	Verdict policy.Outcome `json:"verdict"`
	// Prefix is the one that decided, of the destination or the source. Null
	// where none did.
	Prefix *netip.Prefix `json:"prefix"`
	// Origin is where that which decided comes from: the prefix, or the scope
	// or the switch that put the traffic out of scope. Null where no key did.
	Origin *Origin `json:"origin"`
	// Also are those who state the same. It may be missing.
	Also []Origin `json:"also,omitempty"`
	// Contradicted are the conflicts in which another source's word yields to
	// that of the origin. It may be missing.
	Contradicted []string `json:"contradicted,omitempty"`
	Reason       string   `json:"reason"`

	// Kernel tells that packets get this verdict, by the rules of all chains and
	// those of third parties.
	Kernel bool `json:"kernel"`
	// OverriddenBy is the third-party rule that decides otherwise, for some of the
	// packets at least, or "".
	OverriddenBy string `json:"overridden_by"`
	// Backend is where the chain is kept, "iptables (nft)".
	Backend string `json:"backend"`
	// Rule is the one in the kernel that decides, "" where the traffic passes
	// all of them by.
	Rule string `json:"rule"`
	// Problem is why the rules in the kernel cannot be vouched for. It may be
	// missing.
	Problem string `json:"problem,omitempty"`
	// Drift is how the chain differs from what is desired.
	Drift []string `json:"drift"`

	// Chains are the other chains, each by itself. It may be missing.
	Chains []Explanation `json:"chains,omitempty"`

	found      finding
	overriders []thirdparty.Hit
	stale      bool // something that a sync removes may be what decides
	byHand     bool // a sync does not repair what is wrong
	incomplete bool
}

// Explain answers a question from one reading of documents and kernel, the
// contributions that were read, and the places in which their values stand.
//
// A source or an interface that is not known is taken to be in scope
// (policy.Decide). Where there are several chains, the first that masquerades
// decides, for the kernel lets the first NAT rule bind; if none does, one that
// exempts; the explanation is that of the deciding chain.
func Explain(q Question, v *enforce.State, contributions []policy.Source, places Places) Explanation {
	q.Destination = q.Destination.Unmap().WithZone("")
	q.Source = q.Source.Unmap().WithZone("")
	asked := q.packet()
	var all []Explanation
	for _, p := range v.Policies {
		e := q.blank()
		e.decide(p, p.Decide(asked), contributions, places)
		e.ask(newKernel(v, p.Chain), p.Representative(asked))
		all = append(all, e)
	}
	if len(all) == 0 {
		e := q.blank()
		e.Reason = "nothing is managed: no network and no agent files contribute a policy"
		if q.Incomplete != nil {
			e.Reason = "no document that can be read asks for a chain"
		}
		e.Kernel = true
		all = []Explanation{e}
	}
	at := deciding(all)
	top := all[at]
	top.Chains = append(append([]Explanation{}, all[:at]...), all[at+1:]...)
	for _, other := range top.Chains {
		if !other.Kernel {
			top.Kernel = false
			top.Problem = join(top.Problem, "the rules of chain "+other.Chain+" do not do what its policy says, or cannot be vouched for")
		}
	}
	top.stale = len(v.Stale)+len(v.Duplicates) > 0
	if !asked.DstLocal { // what is for the node itself does not leave it
		top.override(q, v)
	}
	if q.Incomplete != nil {
		top.incomplete, top.Problem = true, join(top.Problem, q.Incomplete.Error())
		top.Drift = []string{}
		for i := range top.Chains {
			top.Chains[i].Drift = []string{}
		}
	}
	return top
}

func (q Question) packet() policy.Packet {
	local := func(a netip.Addr) bool { return q.Local != nil && a.IsValid() && q.Local(a) }
	return policy.Packet{
		Src: q.Source, Dst: q.Destination, Out: q.Interface,
		SrcLocal: local(q.Source), DstLocal: local(q.Destination),
	}
}

func (q Question) blank() Explanation {
	return Explanation{
		Destination: q.Destination, Source: q.Source, Interface: q.Interface,
		Family: policy.FamilyOf(q.Destination), Verdict: policy.OutcomeOutOfScope, Drift: []string{},
	}
}

// decide notes what a policy decided, and who said so.
func (e *Explanation) decide(p policy.Policy, d policy.Decision, contributions []policy.Source, places Places) {
	e.Chain, e.Verdict, e.Reason = p.Chain, d.Outcome, d.Reason
	if d.Entry != nil {
		e.Prefix = &d.Entry.Prefix
	}
	for i, o := range d.Origins {
		found := places.origin(o, contributions)
		if i == 0 {
			e.Origin = &found
		} else {
			e.Also = append(e.Also, found)
		}
	}
	for _, c := range p.Conflicts {
		for _, o := range d.Origins {
			if c.InForce == o {
				e.Contradicted = append(e.Contradicted, c.Error())
			}
		}
	}
}

// deciding returns which of the chains decides.
func deciding(all []Explanation) int {
	best := 0
	for i := range all {
		if rank(all[i]) < rank(all[best]) {
			best = i
		}
	}
	return best
}

// rank orders chains by who decides. Ours in nftables come behind iptables'.
func rank(e Explanation) int {
	switch {
	case e.Verdict == policy.OutcomeMasquerade && !e.found.nftables:
		return 0
	case e.Verdict == policy.OutcomeMasquerade:
		return 1
	case e.Verdict == policy.OutcomeExempt:
		return 2
	}
	return 3
}
