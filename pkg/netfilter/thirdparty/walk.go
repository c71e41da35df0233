// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"math"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// walk follows a packet through base chains. It follows all ways that are possible, where a rule is perhaps: the packet
// continues, and it does not.
type walk struct {
	*machine
	binds   func(Place) Answer // whether an owned chain decides about the packet
	verdict Verdict

	base     *baseChain
	accepted way           // out of the base chain
	asked    bool          // an owned chain of the base chain may have decided
	known    map[visit]way // what is behind a chain
}

// way is where a packet can get to, and its mark there.
type way struct {
	isOpen bool
	mark   mark
}

func (w *way) join(other way) {
	switch {
	case !other.isOpen:
	case !w.isOpen:
		*w = other
	default:
		w.mark = w.mark.join(other.mark)
	}
}

// visit is a chain, and the mark with which a packet reaches it.
type visit struct {
	chain string
	mark  mark
}

// Judge tells what the rules do with a packet. Of an owned chain, binds tells whether it decides.
func (r *Ruleset) Judge(p Packet, binds func(Place) Answer) Verdict {
	w := &walk{machine: newMachine(r.family, p), binds: binds}
	at := way{true, mark{p.Mark, math.MaxUint32}}
	for group := range groupsOf(r.hooks) {
		if at = w.group(group, at); !at.isOpen {
			return w.finished()
		}
	}
	w.verdict.add(Outcome{Fate: Untouched})
	return w.finished()
}

func (w *walk) finished() Verdict {
	w.verdict.Splits = w.splits
	return w.verdict
}

// groupsOf yields the base chains of each priority. Their order is known if they are in one table.
func groupsOf(hooks []*baseChain) func(yield func([]*baseChain) bool) {
	same := func(a, b *baseChain) bool {
		return a.position() == b.position() && a.isNAT == b.isNAT && a.priority == b.priority
	}
	return func(yield func([]*baseChain) bool) {
		for len(hooks) > 0 {
			n := 1
			for n < len(hooks) && same(hooks[0], hooks[n]) {
				n++
			}
			if !yield(hooks[:n]) {
				return
			}
			hooks = hooks[n:]
		}
	}
}

// group follows the packet through base chains of one priority. The kernel does not tell in which order those of
// several tables are called, so each is treated as the first. What one does to the mark, another may see.
func (w *walk) group(bases []*baseChain, at way) (behind way) {
	isOrdered := !slices.ContainsFunc(bases, func(b *baseChain) bool { return b.table != bases[0].table })
	if isOrdered {
		for _, b := range bases {
			if at = w.baseChain(b, at); !at.isOpen {
				break
			}
		}
		return at
	}
	for {
		seen, open := at.mark, true
		for _, b := range bases {
			next := w.baseChain(b, at)
			open = open && next.isOpen
			if next.isOpen {
				seen = seen.join(next.mark)
			}
		}
		if seen == at.mark {
			return way{open, seen}
		}
		at.mark = seen
	}
}

// baseChain follows the packet through a base chain.
func (w *walk) baseChain(b *baseChain, at way) (behind way) {
	w.base, w.accepted, w.asked, w.known = b, way{}, false, map[visit]way{}
	behind = w.chain(b.name, at.mark)
	if behind.isOpen && b.drop != nil && b.isNAT {
		w.verdict.add(Outcome{Fate: Dropped, Rule: b.drop})
		behind = way{}
	}
	behind.join(w.accepted)
	if !b.isNAT && b.priority == prioritySourceNAT { // it may be called after the NAT chains
		behind.join(at)
	}
	return behind
}

// chain follows the packet through a chain, and returns where it comes back to the chain that jumped.
func (w *walk) chain(name string, at mark) (back way) {
	c := w.base.chains[name]
	if c == nil {
		return way{true, at}
	}
	if c.owned {
		return w.owned(c.place, at)
	}
	back, known := w.known[visit{name, at}]
	if known {
		return back
	}
	w.known[visit{name, at}] = way{} // the kernel has no loops
	next := way{true, at}
	for _, r := range c.rules {
		effects, past, untracks := w.run(r, next.mark)
		if untracks {
			w.verdict.Untrackers = addRule(w.verdict.Untrackers, r)
		}
		here := w.mark
		next = past
		for _, e := range effects {
			w.follow(r, e, here, &next, &back)
		}
		if !next.isOpen {
			break
		}
	}
	back.join(next)
	w.known[visit{name, at}] = back
	return back
}

// owned asks about an owned chain.
func (w *walk) owned(at Place, m mark) (back way) {
	decides := w.binds(at)
	if decides != No {
		w.asked = true
		w.verdict.add(Outcome{Fate: Owned})
	}
	return way{decides != Yes, m}
}

// follow takes an end of a rule: to the rule behind it, or back to the chain that jumped.
func (w *walk) follow(r *Rule, e effect, at mark, next, back *way) {
	here := way{true, at}
	isBase := r.Chain == w.base.name
	switch e.code {
	case nfnetlink.DoMasq:
		w.verdict.add(Outcome{Fate: Masqueraded, Rule: r})
	case nfnetlink.DoSNAT:
		w.verdict.add(Outcome{Fate: Translated, Rule: r, To: e.to})
	case nfnetlink.DoDrop:
		if w.base.isNAT {
			w.verdict.add(Outcome{Fate: Dropped, Rule: r})
		} else { // what is dropped leaves with no address
			w.accepted.join(here)
		}
	case nfnetlink.DoJump:
		next.join(w.chain(e.chain, here.mark))
	case nfnetlink.DoGoto:
		returned := w.chain(e.chain, here.mark)
		back.join(returned)
		if isBase && returned.isOpen {
			w.bypass(r)
		}
	case nfnetlink.DoReturn:
		back.join(here)
		if isBase {
			w.bypass(r)
		}
	case nfnetlink.DoAccept:
		w.accepted.join(here)
		w.bypass(r)
	}
}

// bypass notes that a packet may leave the base chain by the rule.
func (w *walk) bypass(r *Rule) {
	if !w.asked && w.base.hasOwned {
		w.verdict.Bypasses = addRule(w.verdict.Bypasses, r)
	}
}
