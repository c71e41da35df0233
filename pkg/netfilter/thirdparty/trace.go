// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Traffic is the first packets of connections to an address that is none of the
// node's. They bear no mark.
type Traffic struct {
	To   netip.Addr
	From policy.Ranges // nil: any source of the family
	// FromLocal tells whether the sources are the node's own. Nil: some may be.
	FromLocal *bool
	// Out are patterns of the interfaces that it leaves through. None: any.
	Out []string
}

// Hit is a third-party rule that decides about traffic.
type Hit struct {
	Rule
	// Sure tells that it decides about all of the traffic. Otherwise that depends
	// on what the traffic does not say, or on what could not be read.
	Sure bool
}

// Trace follows traffic through the base chains in their order and returns the
// rules that decide about it, or may: those that translate or drop it and, before
// a chain that binds, those that keep it from getting there.
//
// Owned tells which chains are not looked at, and whether one binds: it translates
// what reaches it, so that no rule behind it decides. The kernel does not tell the
// order of base chains of one priority; each counts as if it were the first. Errors
// are those of Scan.
func Trace(ctx context.Context, t Traffic, owned func(Place) (is, binds bool)) ([]Hit, error) {
	f := policy.FamilyOf(t.To)
	t.From = policy.RangesOf(f.All()).Intersect(t.From)
	var hits []Hit
	err := withHooks(ctx, func(hooks []hook) error {
		hooks = slices.DeleteFunc(slices.Clone(hooks), func(h hook) bool { return h.Family != f })
		slices.SortStableFunc(hooks, func(a, b hook) int { return cmp.Compare(a.priority, b.priority) })
		var errs []error
		hits = nil
		for left := t.From; len(hooks) > 0 && len(left) > 0; {
			n := 1
			for n < len(hooks) && hooks[n].priority == hooks[0].priority {
				n++
			}
			first, after, deciding := len(hits), left, 0
			for _, h := range hooks[:n] {
				tr := trace{chains: h.chains, base: h.Place, traffic: t, owned: owned, doubt: slices.ContainsFunc(hits, func(h Hit) bool { return !h.Sure })}
				rest, err := tr.hook(h, left)
				if err != nil {
					errs = append(errs, h.failed(err))
					continue
				}
				if !rest.Equal(left) {
					deciding++
				}
				hits, after = append(hits, tr.hits...), after.Intersect(rest)
			}
			if deciding > 1 {
				for i := range hits[first:] {
					hits[first+i].Sure = false
				}
			}
			left, hooks = after, hooks[n:]
		}
		return errors.Join(errs...)
	})
	return hits, err
}

// trace is the way of traffic through one base chain.
type trace struct {
	chains
	base    Place
	traffic Traffic
	owned   func(Place) (is, binds bool)

	hits  []Hit
	kept  []Hit         // that keep packets from what follows in the base chain
	ended policy.Ranges // the sources of what no rule of the base chain sees any more
	bound bool          // something has reached a chain that binds
	doubt bool          // some may have been decided about before
	steps int

	pass bool // what keeps packets from what follows does not
}

// hook returns the sources of what goes on to the next base chain.
func (t *trace) hook(h hook, from policy.Ranges) (policy.Ranges, error) {
	left, err := t.chain(h.Chain, from, condition{}, true, nil)
	if err != nil {
		return nil, err
	}
	left = union(left, t.ended)
	if len(t.kept) > 0 { // that matters if it would have reached a chain that binds
		without := trace{chains: t.chains, base: t.base, traffic: t.traffic, owned: t.owned, pass: true}
		rest, err := without.chain(h.Chain, left, condition{}, true, nil)
		if err != nil {
			return nil, err
		}
		for _, k := range t.kept {
			k.Sure = k.Sure && len(rest) == 0 && !without.doubt && len(without.hits) == 0
			if without.bound {
				t.hits = append(t.hits, k)
			}
		}
	}
	if h.drops && len(left) > 0 {
		t.hits = append(t.hits, t.hit(h.Place, decoded{effect: drops}, !t.doubt && left.Equal(t.traffic.From)))
		left = nil
	}
	return left, nil
}

// chain returns the sources of what goes on behind the chain.
func (t *trace) chain(name string, from policy.Ranges, way condition, sure bool, stack []string) (policy.Ranges, error) {
	if len(from) == 0 {
		return nil, nil
	}
	if slices.Contains(stack, name) {
		return nil, errTooMany
	}
	var binds bool
	rules, place, owned, err := read(t.chains, t.base, name, func(p Place) (is bool) {
		is, binds = t.owned(p)
		return is
	})
	if err != nil {
		return nil, err
	}
	if owned {
		t.bound = t.bound || binds
		if binds && sure {
			return nil, nil
		}
		return from, nil
	}
	var left policy.Ranges // what went on before the end
	isBase := len(stack) == 0
	stack = append(slices.Clip(stack), name)
	for _, d := range rules {
		if t.steps++; t.steps > mostSteps {
			return nil, errTooMany
		}
		d.condition = way.and(d.condition)
		about, exact := t.about(d.condition, from)
		keeps := d.effect == accepts || isBase && (d.effect == returns || d.effect == goes)
		if len(about) == 0 || d.effect == nothing || keeps && t.pass {
			continue
		}
		here := t.hit(place, d, sure && exact && !t.doubt && about.Equal(t.traffic.From))
		t.doubt = t.doubt || !exact
		switch d.effect {
		case masquerades, drops:
			t.hits = append(t.hits, here)
		case accepts:
			t.ended = union(t.ended, about)
		case returns:
			left = union(left, about)
		case jumps, goes:
			behind, err := t.chain(d.target, about, d.condition, sure && exact, stack)
			if err != nil {
				return nil, err
			}
			if d.effect == goes {
				left = union(left, behind)
				here.Sure = here.Sure && !t.doubt && behind.Equal(about)
				break
			}
			if exact {
				from = union(from.Without(about), behind)
			}
			continue
		}
		if keeps {
			t.kept = append(t.kept, here)
		}
		if exact {
			from = from.Without(about)
		}
	}
	return union(left, from), nil
}

func (t *trace) hit(place Place, d decoded, sure bool) Hit {
	h := Hit{Rule: d.at(place), Sure: sure}
	h.Exact = len(h.Unread) == 0
	h.Text = h.text()
	return h
}

// about returns the sources of the packets that the condition may hold for, and
// whether it does for all of these.
func (t *trace) about(c condition, from policy.Ranges) (about policy.Ranges, exact bool) {
	if c.never || c.mark == markNeeded || c.rule.To != nil && !c.rule.To.Contains(t.traffic.To) {
		return nil, true
	}
	exact = len(c.unread) == 0 && c.rule.Protocol == "" && c.rule.Share == 0
	if c.fromLocal || c.rule.NotFromLocal {
		switch {
		case t.traffic.FromLocal == nil:
			exact = false
		case *t.traffic.FromLocal != c.fromLocal:
			return nil, true
		}
	}
	some, all := t.leaves(c)
	if !some {
		return nil, true
	}
	exact = exact && all
	return from.Intersect(c.rule.From), exact
}

// leaves reports whether some of the traffic, and whether all of it, leaves through an
// interface that the condition names. Through lo none does.
func (t *trace) leaves(c condition) (some, all bool) {
	r := Rule{Rule: c.rule, NotOut: c.notOut}
	all = r.Rule.Out == "" && len(r.NotOut) == 0
	if r.Rule.Out == "lo" || all || len(t.traffic.Out) == 0 {
		return r.Rule.Out != "lo", all
	}
	all = true
	for _, out := range t.traffic.Out {
		some = some || r.Leaves(out)
		all = all && (r.Rule.Out == "" || within(out, r.Rule.Out)) &&
			!slices.ContainsFunc(r.NotOut, func(not string) bool { return within(out, not) || within(not, out) })
	}
	return some, all
}

func union(a, b policy.Ranges) policy.Ranges {
	return policy.Normalize(append(slices.Clip(a), b...))
}
