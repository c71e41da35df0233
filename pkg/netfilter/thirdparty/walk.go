// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// chains reads the chains and sets of one table.
type chains interface {
	set(name string) (policy.Ranges, error)
	rules(chain string) ([]nfnetlink.Rule, error)
}

// mostSteps is how many rules are followed in one base chain, those of a chain once for
// each jump that leads there.
const mostSteps = 100_000

var errTooMany = errors.New("too many rules are reached by too many ways")

// walk follows packets through a base chain.
type walk struct {
	chains
	base    Place
	traffic []Packets // all that enter the base chain
	// owned tells whether a chain is owned, which is not followed, and whether it binds: it
	// translates all packets that reach it.
	owned func(Place) (is, binds bool)
	// pass ignores the rules that keep packets from the rest of the base chain, to find out
	// whether the packets would reach a chain that binds.
	pass bool
	// join is for Scan, which asks neither what is Sure nor what other base chains do: neighbouring
	// rules that return for destinations alone become one. An agent's chain has thousands of these.
	join bool

	steps int
	hits  []Hit // rules that translate or drop packets
	kept  []Hit // rules that keep packets from the rest of the base chain
	ended []Packets
	bound bool // packets reached a chain that binds
}

// chain follows the packets through a chain and returns those that continue behind it.
// The way is the conditions of the jumps that lead to the chain.
func (w *walk) chain(name string, in []Packets, way condition, stack []string) ([]Packets, error) {
	if len(in) == 0 {
		return nil, nil
	}
	if slices.Contains(stack, name) {
		return nil, fmt.Errorf("chain %s is reached from itself", policy.Quote(name))
	}
	rules, place, err := w.read(name)
	if err != nil {
		return nil, err
	}
	if owned, binds := w.owned(place); owned {
		w.bound = w.bound || binds
		switch {
		case !binds:
			return in, nil
		case way.exact():
			return nil, nil
		}
		return withUnsure(in, maybeTranslated), nil
	}
	isBase := len(stack) == 0
	stack = append(slices.Clip(stack), name)
	var left []Packets // by return or goto
	for _, d := range rules {
		if w.steps++; w.steps > mostSteps {
			return nil, errTooMany
		}
		keeps := d.statement == nfnetlink.DoAccept ||
			isBase && (d.statement == nfnetlink.DoReturn || d.statement == nfnetlink.DoGoto)
		if d.never || d.statement == nfnetlink.NoStatement && !d.untracks || keeps && w.pass {
			continue
		}
		about := intersect(in, []Packets{d.Packets})
		if len(about) == 0 {
			continue
		}
		full := way.and(d.condition)
		if d.untracks {
			h := d
			h.statement = nfnetlink.Statement(Untracks)
			if w.hits = append(w.hits, w.hit(place, h, full, about)); d.statement == nfnetlink.NoStatement {
				continue
			}
		}
		rest := without(in, []Packets{d.Packets}, w.base.Family)
		certain, unsure := full.exact(), maybeAccepted // of packets that the rule may not decide about
		kept := about
		switch d.statement {
		case nfnetlink.DoMasq, nfnetlink.DoSNAT:
			w.hits, unsure = append(w.hits, w.hit(place, d, full, about)), maybeTranslated
		case nfnetlink.DoDrop:
			w.hits = append(w.hits, w.hit(place, d, full, about))
		case nfnetlink.DoAccept:
			if !w.join {
				w.ended = merge(append(w.ended, about...))
			}
		case nfnetlink.DoReturn:
			certain = d.exact()
			left = append(left, withUnsure(about, d.uncertain())...)
		case nfnetlink.DoJump, nfnetlink.DoGoto:
			behind, err := w.chain(d.target, about, full, stack)
			if err != nil {
				return nil, err
			}
			if d.statement == nfnetlink.DoGoto {
				certain, kept = d.exact(), behind
				left = append(left, withUnsure(behind, d.uncertain())...)
			} else {
				rest, certain = append(rest, behind...), true
			}
		}
		if keeps && len(kept) > 0 {
			w.kept = append(w.kept, w.hit(place, d, full, kept))
		}
		if !certain {
			rest = append(rest, withUnsure(about, unsure)...)
		}
		in = merge(rest)
	}
	return merge(append(left, in...)), nil
}

// read decodes the rules of a chain, unless the chain is owned by its name.
func (w *walk) read(name string) (rules []decoded, at Place, err error) {
	at = w.base
	at.Chain = name
	if owned, _ := w.owned(at); owned {
		return nil, at, nil
	}
	undecoded, err := w.rules(name)
	for _, r := range undecoded {
		d := decode(at.Family, r, w)
		if n := len(rules); w.join && n > 0 && rules[n-1].returnsDestinations() && d.returnsDestinations() {
			rules[n-1].To = append(rules[n-1].To, d.To...)
		} else {
			rules = append(rules, d)
		}
		if at.Owner == (policy.Owner{}) {
			at.Owner = policy.ParseOwner(d.comment)
		}
	}
	for i := range rules {
		if rules[i].To != nil {
			rules[i].To = policy.Normalize(rules[i].To)
		}
	}
	return rules, at, err
}

// earlierRule is Unread if it is not known which packets get past an earlier rule.
const earlierRule = "an earlier rule"

// hit returns a rule that packets reach.
func (w *walk) hit(place Place, d decoded, full condition, about []Packets) Hit {
	h := Hit{Rule: Rule{
		Place: place, Action: Action(d.statement), Match: full.Packets, Comment: d.comment,
		Unread: slices.Clone(full.unread), reached: about,
	}}
	if d.statement == nfnetlink.DoGoto {
		h.Action = Returns
	}
	unsure := uint8(0)
	for _, p := range about {
		unsure |= p.unsure
	}
	if unsure&maybeAccepted != 0 {
		h.Unread = append(h.Unread, earlierRule)
	}
	h.Sure = !w.join && full.exact() && unsure == 0 && len(without(w.traffic, about, w.base.Family)) == 0
	if full.notOrigins == fromOthers {
		h.Unread = append(h.Unread, "the node's own addresses")
	}
	slices.Sort(h.Unread)
	h.Unread = slices.Compact(h.Unread)
	h.Exact = len(h.Unread) == 0
	h.Text = h.text(full)
	return h
}

// Scan returns the third-party rules that change the source of packets, in the network
// namespace of the calling thread. It does not follow owned chains. Base chains that
// cannot be read are in the error; the rules of the others are returned with it.
func Scan(ctx context.Context, owned func(Place) bool) ([]Rule, error) {
	return scan(ctx, sourceNAT(), owned, func(w *walk, _ int) []Hit {
		return slices.DeleteFunc(w.hits, func(h Hit) bool { return h.Action == Drops })
	})
}

// Untracked returns the rules that keep forwarded packets from connection tracking. Errors are those of Scan.
func Untracked(ctx context.Context) ([]Rule, error) {
	return scan(ctx, beforeTracking(), func(Place) bool { return false }, func(w *walk, _ int) []Hit {
		return slices.DeleteFunc(w.hits, func(h Hit) bool { return h.Action != Untracks })
	})
}

// Accepted returns the rules that keep packets from an owned chain, by ACCEPT or otherwise: they are before
// it in its base chain. Errors are those of Scan.
func Accepted(ctx context.Context, owned func(Place) bool) ([]Rule, error) {
	return scan(ctx, sourceNAT(), owned, func(w *walk, before int) []Hit { return w.kept[:before] })
}

// scan follows all packets through the base chains of a point and returns the hits that the function
// chooses. Its number is how many rules kept packets from the last owned chain that they could reach.
func scan(ctx context.Context, at hookPoint, owned func(Place) bool, choose func(w *walk, before int) []Hit) ([]Rule, error) {
	var found []Rule
	err := withHooks(ctx, at, func(hooks []hook) error {
		var errs []error
		found = nil
		for _, h := range hooks {
			all, before := []Packets{{}}, 0
			w := walk{chains: h.chains, base: h.Place, traffic: all, join: true}
			w.owned = func(p Place) (is, binds bool) {
				if owned(p) {
					is, before = true, len(w.kept)
				}
				return is, false
			}
			if _, err := w.chain(h.Chain, all, condition{}, nil); err != nil {
				errs = append(errs, h.failed(err))
				continue
			}
			for _, hit := range choose(&w, before) {
				found = append(found, hit.Rule)
			}
		}
		return errors.Join(errs...)
	})
	return found, err
}

// Traffic is the first packets of connections to an address that is not local. They have
// no mark.
type Traffic struct {
	To   netip.Addr
	From policy.Ranges // nil: any source of the family
	// FromLocal tells whether the sources are the node's own. Nil: some may be.
	FromLocal *bool
	// Out are patterns of the interfaces that it leaves through. None: any.
	Out []string
}

// packets returns the traffic as sets of packets. None of it leaves through lo.
func (t Traffic) packets() []Packets {
	p := Packets{From: t.From, To: policy.RangesOf(netip.PrefixFrom(t.To, t.To.BitLen())), NotOut: []string{"lo"}}
	if t.FromLocal != nil {
		p.notOrigins = fromNode
		if *t.FromLocal {
			p.notOrigins = fromOthers
		}
	}
	var patterns []Packets
	for _, out := range t.Out {
		patterns = append(patterns, Packets{Out: out})
	}
	if len(patterns) == 0 {
		patterns = append(patterns, Packets{})
	}
	return intersect([]Packets{p}, patterns)
}

// Hit is a third-party rule that decides about traffic.
type Hit struct {
	Rule
	// Sure tells that the rule decides about all of the traffic. Otherwise that depends on
	// properties that the traffic does not state, or on conditions that were not decoded.
	Sure bool
}

// Trace follows traffic through the base chains in their order. It returns the rules that
// decide about it, or may decide: those that translate or drop packets, and those that keep
// packets from a chain that binds.
//
// Owned tells which chains are not followed, and which of these bind: they translate all
// packets that reach them. The kernel does not tell the order of base chains of one
// priority; each is treated as the first. Errors are those of Scan.
func Trace(ctx context.Context, t Traffic, owned func(Place) (is, binds bool)) ([]Hit, error) {
	f := policy.FamilyOf(t.To)
	t.From = policy.RangesOf(f.All()).Intersect(t.From)
	var hits []Hit
	err := withHooks(ctx, sourceNAT(), func(hooks []hook) error {
		hooks = slices.DeleteFunc(slices.Clone(hooks), func(h hook) bool { return h.Family != f })
		slices.SortStableFunc(hooks, func(a, b hook) int { return cmp.Compare(a.Priority, b.Priority) })
		var errs []error
		hits = nil
		all := t.packets()
		for left := all; len(hooks) > 0 && len(left) > 0; {
			n := 1
			for n < len(hooks) && hooks[n].Priority == hooks[0].Priority {
				n++
			}
			first, after, deciding := len(hits), left, 0
			for _, h := range hooks[:n] {
				w := walk{chains: h.chains, base: h.Place, traffic: all, owned: owned}
				rest, err := w.hook(h, left)
				if err != nil {
					errs = append(errs, h.failed(err))
					continue
				}
				if len(without(left, rest, f)) > 0 {
					deciding++
				}
				hits, after = append(hits, w.hits...), intersect(after, rest)
			}
			for i := range hits[first:] {
				hits[first+i].Sure = hits[first+i].Sure && deciding <= 1
			}
			left, hooks = after, hooks[n:]
		}
		return errors.Join(errs...)
	})
	return hits, err
}

// hook follows packets through a base chain and returns those that continue to the next
// one. Rules that keep packets from the rest of the base chain are hits if the packets
// would otherwise reach a chain that binds.
func (w *walk) hook(h hook, in []Packets) ([]Packets, error) {
	left, err := w.chain(h.Chain, in, condition{}, nil)
	if err != nil {
		return nil, err
	}
	if h.drops && len(left) > 0 {
		w.hits = append(w.hits, w.hit(h.Place, decoded{statement: nfnetlink.DoDrop}, condition{}, left))
		left = nil
	}
	left = merge(append(left, w.ended...))
	if len(w.kept) == 0 {
		return left, nil
	}
	passed := walk{chains: w.chains, base: w.base, traffic: w.traffic, owned: w.owned, pass: true}
	rest, err := passed.chain(h.Chain, left, condition{}, nil)
	if err != nil {
		return nil, err
	}
	for _, k := range w.kept {
		k.Sure = k.Sure && len(rest) == 0 && len(passed.hits) == 0
		if passed.bound {
			w.hits = append(w.hits, k)
		}
	}
	return left, nil
}
