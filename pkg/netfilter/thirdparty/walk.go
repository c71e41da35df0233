// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"math"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// walk follows a packet through base chains. It follows all ways that are possible, where a rule is perhaps:
// the packet continues, and it does not.
type walk struct {
	*machine
	binds   func(Place) Answer // whether an owned chain decides about the packet
	verdict Verdict

	base     *baseChain
	accepted way            // out of the base chain
	asked    bool           // an owned chain of the base chain may have decided
	behind   map[visit]way  // chains that were followed already
	visits   map[string]int // how many of each chain
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
	const perQuestion = 4 // steps, beside those for rules
	w := &walk{machine: newMachine(r.family, p), binds: binds}
	w.steps = perQuestion
	at := way{true, mark{p.Mark, math.MaxUint32}}
	groups := groupsOf(r.hooks)
	for _, group := range groups {
		if at.isOpen && !group[0].isBehindNAT() {
			at = w.group(group, at)
		}
	}
	if at.isOpen {
		w.verdict.add(Outcome{Fate: Untouched})
	}
	w.behindNAT(groups)
	w.verdict.Splits, w.verdict.steps = w.splits, w.steps
	return w.verdict
}

// behindNAT follows packets through the chains that see them after they were translated. Their mark is not
// known then, nor is their source if a rule may have changed it.
func (w *walk) behindNAT(groups [][]*baseChain) {
	if w.verdict.mayTranslate() {
		destination := addressBits(w.family, w.packet.Dst)
		w.addresses = unknownBits(len(destination.value)).followedBy(destination)
	}
	for _, group := range groups {
		if group[0].mayBeBehindNAT() {
			w.group(group, way{isOpen: true})
		}
	}
}

// groupsOf returns the base chains of each priority. Their order is known if they are in one table.
func groupsOf(hooks []*baseChain) (groups [][]*baseChain) {
	for i, b := range hooks {
		if i > 0 && b.compare(hooks[i-1]) == 0 {
			last := len(groups) - 1
			groups[last] = append(groups[last], b)
		} else {
			groups = append(groups, []*baseChain{b})
		}
	}
	return groups
}

// group follows the packet through base chains of one priority.
func (w *walk) group(bases []*baseChain, at way) (behind way) {
	if !inOneTable(bases) {
		return w.inAnyOrder(bases, at)
	}
	for _, b := range bases {
		at = w.baseChain(b, at)
		if !at.isOpen {
			break
		}
	}
	return at
}

// inAnyOrder follows the packet through base chains of several tables. The kernel does not tell in which
// order it calls them, so each is treated as the first. What one does to the mark or the addresses, another
// may see: all are followed again until nothing more is written.
func (w *walk) inAnyOrder(bases []*baseChain, at way) (behind way) {
	for {
		wasWritten := w.isWritten
		behind = at
		for _, b := range bases {
			next := w.baseChain(b, at)
			behind.isOpen = behind.isOpen && next.isOpen
			if next.isOpen {
				behind.mark = behind.mark.join(next.mark)
			}
		}
		if behind.mark == at.mark && w.isWritten == wasWritten {
			return behind
		}
		at.mark = behind.mark
	}
}

func inOneTable(bases []*baseChain) bool {
	for _, b := range bases {
		if b.table != bases[0].table {
			return false
		}
	}
	return true
}

// baseChain follows the packet through a base chain.
func (w *walk) baseChain(b *baseChain, at way) (behind way) {
	w.base, w.accepted, w.asked = b, way{}, false
	w.behind, w.visits = map[visit]way{}, map[string]int{}
	behind = w.chain(b.name, at.mark)
	if behind.isOpen && b.drop != nil && b.isNAT {
		w.verdict.add(Outcome{Fate: Dropped, Rule: b.drop})
		behind = way{}
	}
	behind.join(w.accepted)
	if b.mayBeBehindNAT() {
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
		return w.askOwned(c.place, at)
	}
	// Chains that jump twice and change the mark between double the number of marks with each further chain.
	const mostMarks = 16
	if w.visits[name] >= mostMarks {
		at = mark{}
	}
	here := visit{name, at}
	back, isKnown := w.behind[here]
	if isKnown {
		return back
	}
	w.visits[name]++
	w.behind[here] = way{} // the kernel has no loops
	back = w.rules(c.rules, at)
	w.behind[here] = back
	return back
}

// rules follows the packet through the rules of a chain, and returns where it comes back to the chain that
// jumped.
func (w *walk) rules(rules []*Rule, at mark) (back way) {
	next := way{true, at}
	for _, r := range rules {
		does := w.meet(r, next.mark)
		next = does.past
		for _, e := range does.ends {
			onward, returned := w.follow(r, e, does.at.mark)
			next.join(onward)
			back.join(returned)
		}
		if !next.isOpen {
			return back
		}
	}
	back.join(next)
	return back
}

// meet runs a rule, and notes what it does to the packet without an end.
func (w *walk) meet(r *Rule, at mark) passage {
	wasWritten := w.isWritten
	does := w.run(r, at)
	if w.isWritten && !wasWritten { // other rules match in a chain that is met again
		w.behind = map[visit]way{}
	}
	if does.untracks {
		w.verdict.Untrackers = addRule(w.verdict.Untrackers, r)
	}
	if does.rewrites {
		w.verdict.add(Outcome{Fate: Translated, Rule: r})
	}
	return does
}

// askOwned asks whether an owned chain decides.
func (w *walk) askOwned(at Place, m mark) (back way) {
	decides := w.binds(at)
	if decides != No {
		w.asked = true
		w.verdict.add(Outcome{Fate: Owned})
	}
	return way{decides != Yes, m}
}

// follow takes an end of a rule: to the next rule of the chain, back to the chain that jumped, or to neither.
func (w *walk) follow(r *Rule, e effect, at mark) (next, back way) {
	here := way{true, at}
	switch e.code {
	case nfnetlink.DoMasq:
		w.verdict.add(Outcome{Fate: Masqueraded, Rule: r})
	case nfnetlink.DoSNAT:
		w.verdict.add(Outcome{Fate: Translated, Rule: r, To: e.to})
	case nfnetlink.DoDrop:
		// Firewalls drop packets in other chains. That is not reported: the question is with which source
		// address the packets leave that do.
		if w.base.isNAT {
			w.verdict.add(Outcome{Fate: Dropped, Rule: r})
		} else {
			w.accepted.join(here)
		}
	case nfnetlink.DoAccept:
		w.accepted.join(here)
		w.bypass(r)
	case nfnetlink.DoJump:
		next = w.chain(e.chain, at)
	case nfnetlink.DoGoto:
		back = w.chain(e.chain, at)
	case nfnetlink.DoReturn:
		back = here
	}
	leavesBase := back.isOpen && r.Chain == w.base.name
	if leavesBase {
		w.bypass(r)
	}
	return next, back
}

// bypass notes that a packet may leave the base chain by the rule.
func (w *walk) bypass(r *Rule) {
	if !w.asked && w.base.hasOwned {
		w.verdict.Bypasses = addRule(w.verdict.Bypasses, r)
	}
}
