// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"net/netip"
	"reflect"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// samePolicies reports whether two lists of sources ask for the same. A new subnet of pods is no change of a
// policy, which could be refused, and would delete connections.
func samePolicies(before, after []policy.Source) bool {
	if len(before) != len(after) {
		return false
	}
	for i := range after {
		if !asksForSame(store.State{Sources: before}.Find(after[i].ID), &after[i]) {
			return false
		}
	}
	return true
}

func asksForSame(before, after *policy.Source) bool {
	return before != nil && before.Superseded == after.Superseded && before.Policy.Equal(after.Policy) &&
		reflect.DeepEqual(before.Files, after.Files)
}

// resets returns the resets that are due after the rules are written: those on record, and those for what is
// about to be written. They are put on record even if some chain fails: State.ResetsDue waits until none
// does.
//
// Verdicts are compared, and not rules: a renamed chain deletes nothing. Resets are on record before rules
// are written, so that a plugin that is killed loses none. If another process walks before the rules of the
// killed one are repaired, a reset is lost. To prevent that would take a second write of the record for each
// change. Nor are connections reset that begin while a run is at work, after another program removed rules
// that this run had read already: the time is milliseconds, and the resets would have to be decided once more
// before each write.
func (s *State) resets(at int64) []store.Reset {
	r := resetList{slices.Clone(s.onRecord.now.Resets), at}
	r.addPassed(s.node.exempt.passed(s.onRecord.now))
	r.addLeft(s.left())
	if len(s.resetting()) == 0 {
		return r.list
	}
	remaining := s.remainingSources()
	if len(remaining) > 0 && s.verdictsChange(remaining) {
		r.add(store.Reset{Before: remaining, Pods: s.onRecord.now.Addresses()})
	}
	if s.mayBeUntranslated(remaining) {
		r.add(store.Reset{})
	}
	return r.list
}

// verdictsChange reports whether the run changes rules because the policies change. Remaining are the sources
// before it.
func (s *State) verdictsChange(remaining []policy.Source) bool {
	isChange := s.documents.before != nil && !samePolicies(remaining, s.documents.after)
	return isChange && len(s.rulesDiff(anyChain))+len(s.Stale) > 0
}

// mayBeUntranslated reports whether there may be connections that should have been masqueraded and were not.
func (s *State) mayBeUntranslated(remaining []policy.Source) bool {
	isFirstWrite := len(s.onRecord.now.Chains) == 0
	if isFirstWrite || s.dropsMore() || s.lostRules() {
		return true
	}
	if s.documents.before == nil {
		return false
	}
	areFirstPolicies := len(remaining) == 0 && s.verdictsChange(remaining)
	return areFirstPolicies || s.findsRange(remaining)
}

// resetting returns the chains that reset connections and did not fail, by name.
func (s *State) resetting() map[string]*Chain {
	resetting := map[string]*Chain{}
	for i := range s.Chains {
		c := &s.Chains[i]
		if c.Err == nil && c.Policy.ResetsConnections() {
			resetting[c.Policy.Chain] = c
		}
	}
	return resetting
}

// remainingSources returns the sources before the change, without those of which neither the source nor the
// chain remains: removing a chain deletes no connection.
func (s *State) remainingSources() []policy.Source {
	var remaining []policy.Source
	for _, before := range s.documents.before {
		for _, after := range s.documents.after {
			if after.ID == before.ID || after.Policy.Chain == before.Policy.Chain {
				remaining = append(remaining, before)
				break
			}
		}
	}
	return remaining
}

// findsRange reports whether the first pod range of a policy and family became known: connections before were
// judged by none.
func (s *State) findsRange(before []policy.Source) bool {
	for _, was := range policiesOf(before, s.onRecord.now.Addresses()) {
		c := s.Find(was.Chain)
		if c == nil || !c.Policy.ResetsConnections() {
			continue
		}
		for _, f := range c.Policy.Families() {
			if len(was.PodRanges(f)) == 0 && len(c.Policy.PodRanges(f)) > 0 {
				return true
			}
		}
	}
	return false
}

// lostRules reports whether rules that had been written are missing or changed, of chains that reset
// connections, or of what belongs to no chain in their tables. While a policy changes, only whole chains and
// their jumps count, as other differences may be the change. A subnet that is found changes no rule.
func (s *State) lostRules() bool {
	resetting := s.resetting()
	policyChanges := s.documents.before != nil && !samePolicies(s.documents.before, s.documents.after)
	if policyChanges {
		for _, c := range resetting {
			if s.lostChain(c) {
				return true
			}
		}
		return false
	}
	for _, change := range s.rulesDiff((*Chain).wasWritten) {
		if change.Chain == "" || resetting[change.Chain] != nil {
			return true
		}
	}
	return false
}

// lostChain reports whether a chain that was on record before the run has no jump or no rules in some family.
func (s *State) lostChain(c *Chain) bool {
	for _, want := range c.Desired.Chains {
		have := c.Observed.Find(want.Family, want.Name)
		isLost := have == nil || len(have.Jumps) == 0 || len(have.Rules) == 0
		if isLost && owns(s.onRecord.before, want.Family, want.Name, c.Choice) {
			return true
		}
	}
	return false
}

// dropsMore reports whether a guard is about to drop packets that none in the kernel drops, such as those of
// a subnet that an ADD found. The connections of an exempt pod end with it, or are those of an address that
// passed.
func (s *State) dropsMore() bool {
	if s.Guard.handle == nil {
		return false
	}
	var exempt []netip.Prefix
	for _, pod := range s.onRecord.now.Pods {
		exempt = append(exempt, netip.PrefixFrom(pod.Address, pod.Address.BitLen()))
	}
	known, resetting := policy.RangesOf(exempt...), s.resetting()
	for _, g := range s.Guard.Desired {
		if g.Mode != policy.GuardDrop || resetting[g.Chain] == nil {
			continue
		}
		dropped := policy.Ranges{}
		o := guardOf(s.Guard.Observed.Guards, g.Chain, g.Family)
		isThere := o != nil && o.Mode == policy.GuardDrop
		if isThere {
			dropped = slices.Concat(dropped, o.Scope.Sources)
		}
		if !isThere || len(g.Scope.Sources.Without(dropped).Without(known)) > 0 {
			return true
		}
	}
	return false
}

// maxChanges is the number of changes of policies for which resets are kept on record while no walk passes:
// the first ones are forgotten then. Of each other kind there is one.
const maxChanges = 5

// resetList is a list of resets to which more are added at one time.
type resetList struct {
	list []store.Reset
	at   int64
}

// add adds a reset, or renews an equal one: a walk that runs already may have passed entries that
// the rules to come contradict.
func (r *resetList) add(reset store.Reset) {
	var others []store.Reset
	changes := 0
	for _, x := range r.list {
		same := x
		same.At = reset.At
		if reflect.DeepEqual(same, reset) {
			continue
		}
		others = append(others, x)
		if x.Before != nil {
			changes++
		}
	}
	if reset.Before != nil && changes >= maxChanges {
		others = withoutFirstChange(others)
	}
	reset.At = r.at
	if len(others) > 0 {
		reset.At = max(reset.At, others[len(others)-1].At+1)
	}
	others = append(others, reset)
	r.list = others
}

func withoutFirstChange(resets []store.Reset) []store.Reset {
	for i := range resets {
		if resets[i].Before != nil {
			return slices.Delete(resets, i, i+1)
		}
	}
	return resets
}

// addPassed adds addresses to the reset for those that passed to other pods.
func (r *resetList) addPassed(addresses []netip.Addr) {
	if len(addresses) == 0 {
		return
	}
	all := slices.Concat(addresses, r.remove(isForPassed).Passed)
	slices.SortFunc(all, netip.Addr.Compare)
	r.add(store.Reset{Passed: slices.Compact(all)})
}

// addLeft adds addresses to the reset for those that left the node.
func (r *resetList) addLeft(addresses []store.ChainAddress) {
	if len(addresses) == 0 {
		return
	}
	all := slices.Concat(addresses, r.remove(isForLeft).Left)
	slices.SortFunc(all, store.ChainAddress.Compare)
	r.add(store.Reset{Left: slices.Compact(all)})
}

func isForPassed(r store.Reset) bool { return r.Passed != nil }

func isForLeft(r store.Reset) bool { return r.Left != nil }

// remove removes the reset of a kind of which there is one at most, and returns it, or the zero Reset.
func (r *resetList) remove(isOfKind func(store.Reset) bool) store.Reset {
	for i, x := range r.list {
		if isOfKind(x) {
			r.list = slices.Delete(r.list, i, i+1)
			return x
		}
	}
	return store.Reset{}
}
