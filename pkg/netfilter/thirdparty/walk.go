// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// mostSteps is how many rules are followed in one base chain, again for each jump to them.
const mostSteps = 100_000

// walk follows all packets through a base chain. Packets that a rule keeps from the rest of the base chain are
// followed nevertheless, to find out which owned chains they would reach.
type walk struct {
	table
	base  *Place
	owned func(Place) bool

	steps int
	found []Rule // that decide about packets, and owned chains, in the order in which packets reach them
}

// chain follows the packets through a chain that is not owned and returns those that continue
// behind it. The way is the conditions of the jumps that lead to the chain.
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
	if w.owned(place) {
		w.add(place, isOwned, decoded{}, way, in)
		return in, nil
	}
	pass := &passage{w, place, way, len(stack) == 0, append(slices.Clip(stack), name), nil}
	for _, d := range rules {
		if w.steps++; w.steps > mostSteps {
			return nil, errors.New("too many rules are reached by too many ways")
		}
		if d.never || d.statement == nfnetlink.NoStatement && !d.untracks {
			continue
		}
		if in, err = pass.rule(d, in); err != nil {
			return nil, err
		}
	}
	return merge(append(pass.left, in...)), nil
}

// passage is the way of packets through one chain.
type passage struct {
	*walk
	place  Place
	way    condition
	isBase bool
	stack  []string  // the chain, and those that lead to it
	left   []Packets // by return or goto
}

// rule returns the packets that meet the next rule.
func (p *passage) rule(d decoded, in []Packets) ([]Packets, error) {
	keeps := d.statement == nfnetlink.DoAccept || p.isBase && d.statement == nfnetlink.DoReturn
	var past []Packets // of those that were kept before
	if keeps {
		past, in = having(in, kept, true), having(in, kept, false)
	}
	about := intersect(in, []Packets{d.Packets})
	rest := append(without(in, d.Packets, p.base.Family), past...)
	if len(about) == 0 {
		return rest, nil
	}
	full := p.way.and(d.condition)
	if d.untracks {
		p.add(p.place, Untracks, d, full, about)
	}
	certain, before := full.exact(), maybeAccepted // of packets that the rule may not decide about
	switch d.statement {
	case nfnetlink.NoStatement:
		return in, nil
	case nfnetlink.DoMasq, nfnetlink.DoSNAT, nfnetlink.DoDrop, nfnetlink.DoAccept:
		p.add(p.place, Action(d.statement), d, full, about)
		if d.statement == nfnetlink.DoMasq || d.statement == nfnetlink.DoSNAT {
			before = 0
		}
	case nfnetlink.DoReturn:
		certain = d.exact()
		if p.isBase {
			p.add(p.place, Returns, d, full, about)
		} else {
			p.left = append(p.left, with(about, d.uncertain())...)
		}
	case nfnetlink.DoJump, nfnetlink.DoGoto:
		behind, err := p.chain(d.target, about, full, p.stack)
		if err != nil {
			return nil, err
		}
		switch {
		case d.statement == nfnetlink.DoJump:
			rest, certain = append(rest, behind...), true
		case p.isBase: // a packet that comes back from a goto does not continue here
			p.add(p.place, Returns, d, full, behind)
			rest = append(rest, with(behind, kept)...)
		default:
			certain = d.exact()
			p.left = append(p.left, with(behind, d.uncertain())...)
		}
	}
	if keeps {
		rest = append(rest, with(about, kept)...)
	}
	if !certain {
		rest = append(rest, with(about, before)...)
	}
	return merge(rest), nil
}

// read decodes the rules of a chain, unless the chain is owned by its name. Neighbouring rules that return for
// destinations alone become one: an agent's chain has thousands of these, and each other rule costs time for all before it.
func (w *walk) read(name string) (rules []decoded, at Place, err error) {
	at = *w.base
	at.Chain = name
	if w.owned(at) {
		return nil, at, nil
	}
	undecoded, err := w.rules(name)
	for _, r := range undecoded {
		d := decode(at.Family, r, w.table)
		if n := len(rules); n > 0 && rules[n-1].returnsDestinations() && d.returnsDestinations() {
			rules[n-1].To = append(rules[n-1].To, d.To...)
		} else {
			rules = append(rules, d)
		}
		if at.Owner == (policy.Owner{}) {
			at.Owner = policy.ParseOwner(d.comment)
		}
	}
	for i, d := range rules {
		if d.To != nil {
			rules[i].To = policy.Normalize(d.To)
		}
	}
	return rules, at, err
}

// add adds a rule, if packets reach it that no rule has kept from it. Of an owned chain those count too.
func (w *walk) add(place Place, a Action, d decoded, full condition, about []Packets) {
	if a != isOwned {
		about = having(about, kept, false)
	}
	if len(about) == 0 {
		return
	}
	r := Rule{Place: place, Action: a, Match: full.Packets, Comment: d.comment, Unread: slices.Clone(full.unread),
		reached: about, certain: full.exact(), base: w.base}
	if len(having(about, maybeAccepted, true)) > 0 {
		r.Unread = append(r.Unread, "an earlier rule") // as it is not known which packets get past it
	}
	if full.notOrigins == fromOthers {
		r.Unread = append(r.Unread, "the node's own addresses")
	}
	slices.Sort(r.Unread)
	r.Unread = slices.Compact(r.Unread)
	r.Exact = len(r.Unread) == 0
	r.Text = r.text(full)
	w.found = append(w.found, r)
}

// Scan returns the third-party rules that change the source of packets, in the network namespace of
// the calling thread. It does not follow owned chains. Its error names chains that cannot be read.
func Scan(owned func(Place) bool) ([]Rule, error) {
	rules, err := scan(sourceNAT(), owned)
	return slices.DeleteFunc(rules, func(r Rule) bool { return r.Action != Masquerades && r.Action != Translates }), err
}

// Untracked returns the rules that keep forwarded packets from connection tracking. Errors are those of Scan.
func Untracked() ([]Rule, error) {
	const priorityRaw, priorityConntrack = -300, -200 // NF_IP_PRI_RAW, NF_IP_PRI_CONNTRACK
	at := hookPoint{"raw", "PREROUTING", unix.NF_INET_PRE_ROUTING, priorityRaw, priorityConntrack}
	rules, err := scan(at, func(Place) bool { return false })
	return slices.DeleteFunc(rules, func(r Rule) bool { return r.Action != Untracks }), err
}

// Accepted returns the rules that keep packets from an owned chain. Errors are those of Scan.
func Accepted(owned func(Place) bool) ([]Rule, error) {
	rules, err := scan(sourceNAT(), owned)
	var accepted []Rule
	for i, r := range rules {
		isLater := func(o Rule) bool { return o.Action == isOwned && o.base == r.base }
		if r.keeps() && slices.ContainsFunc(rules[i:], isLater) {
			accepted = append(accepted, r)
		}
	}
	return accepted, err
}

// scan follows all packets through the base chains of a point, those of nf_tables at one generation.
func scan(at hookPoint, owned func(Place) bool) ([]Rule, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	hooks, errLegacy := at.legacy()
	rules, err := follow(hooks, owned)
	errTables := withTables(func(c *nfnetlink.Conn) error {
		found, _, err := nfnetlink.ConsistentRead(c, func() ([]Rule, error) {
			hooks, errHooks := at.hooks(c)
			found, err := follow(hooks, owned)
			return found, errors.Join(errHooks, err)
		}, nil)
		rules = append(rules, found...)
		return err
	})
	return rules, errors.Join(errLegacy, err, errTables)
}

func follow(hooks []hook, owned func(Place) bool) (found []Rule, err error) {
	for _, h := range hooks {
		w := walk{table: h.table, base: &h.Place, owned: owned}
		if _, failed := w.chain(h.Chain, []Packets{{}}, condition{}, nil); failed != nil {
			err = errors.Join(err, fmt.Errorf("read the rules of table %s (%s): %w", plain(h.Table), h.Family, failed))
			continue
		}
		found = append(found, w.found...)
	}
	return found, err
}

// Traffic is the first packets of connections to an address that is not local, without a mark.
type Traffic struct {
	To   netip.Addr
	From policy.Ranges // nil: any source of the family
	// FromLocal tells whether the sources are the node's own. If it is nil, some may be.
	FromLocal *bool
	// Out has patterns of the interfaces through which the traffic leaves; none means any.
	Out []string
}

// packets returns the traffic as sets of packets. None of it leaves through lo.
func (t Traffic) packets() []Packets {
	p := Packets{From: t.From, To: policy.RangesOf(netip.PrefixFrom(t.To, t.To.BitLen())), NotOut: []string{"lo"}}
	if t.FromLocal != nil {
		p.notOrigins = map[bool]uint8{true: fromOthers, false: fromNode}[*t.FromLocal]
	}
	if len(t.Out) == 0 {
		return []Packets{p}
	}
	var patterns []Packets
	for _, out := range t.Out {
		patterns = append(patterns, Packets{Out: out})
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

// Trace returns the rules that decide about traffic, or may decide, in the order of their base
// chains. Owned tells which chains are not followed, and which of these bind: they translate all
// packets that reach them. The kernel does not tell the order of base chains of one priority; each
// is treated as the first. Errors are those of Scan.
func Trace(t Traffic, owned func(Place) (is, binds bool)) ([]Hit, error) {
	rules, err := scan(sourceNAT(), func(p Place) bool {
		is, _ := owned(p)
		return is
	})
	return t.trace(rules, func(p Place) bool {
		_, binds := owned(p)
		return binds
	}), err
}

// trace follows the traffic through base chains, and chooses the rules that decide about it.
func (t Traffic) trace(rules []Rule, binds func(Place) bool) (hits []Hit) {
	f := policy.FamilyOf(t.To)
	t.From = policy.RangesOf(f.All()).Intersect(t.From)
	rules = slices.DeleteFunc(slices.Clone(rules), func(r Rule) bool { return r.Family != f })
	slices.SortStableFunc(rules, func(a, b Rule) int { return cmp.Compare(a.Priority, b.Priority) })
	all := t.packets()
	// What reaches the base chains of this priority, the next rule of this base chain, the base chains of the next priority.
	atPriority, left, next := all, all, all
	for i, r := range rules {
		if i > 0 && r.Priority != rules[i-1].Priority {
			atPriority = next
		}
		if i > 0 && r.base != rules[i-1].base {
			left = atPriority
		}
		about := intersect(left, having(r.reached, kept, false))
		wouldBind := func(o Rule) bool {
			return o.Action == isOwned && o.base == r.base && binds(o.Place) && len(intersect(about, having(o.reached, kept, true))) > 0
		}
		if len(about) == 0 || r.Action == isOwned && !binds(r.Place) || r.keeps() && !slices.ContainsFunc(rules[i:], wouldBind) {
			continue
		}
		if r.Action != isOwned {
			hits = append(hits, Hit{r, r.decidesAll(all, about)})
		}
		if !r.keeps() {
			left, next = r.past(left, about), r.past(next, about)
		}
	}
	return hits
}

// keeps reports whether the rule keeps packets from the rest of the base chain.
func (r Rule) keeps() bool { return r.Action == Accepts || r.Action == Returns }

// decides reports whether the rule decides for certain about packets that reach it.
func (r Rule) decides(p Packets) bool { return r.certain && p.before&maybeAccepted == 0 }

// decidesAll reports whether the rule decides for certain about all packets, of which some reach it.
func (r Rule) decidesAll(all, about []Packets) bool {
	for _, p := range about {
		if r.decides(p) {
			all = without(all, p, r.Family)
		}
	}
	return len(all) == 0
}

// past returns the packets that may get past the rule, which some of them reach.
func (r Rule) past(all, about []Packets) []Packets {
	for _, p := range about {
		if all = without(all, p, r.Family); !r.decides(p) {
			p.before |= maybeAccepted
			all = append(all, p)
		}
	}
	return all
}
