// SPDX-License-Identifier: Apache-2.0

package nftables

import "github.com/ip-masq/ip-masq-cni/pkg/policy"

// onlyElements finds out whether the table is right but for the elements of one
// set, and returns the change of those. Elements of one live set come and go at
// one moment; two sets changed in one batch would not change together.
func onlyElements(have *table, desired []policy.Chain) ([]delta, bool) {
	if !have.hooked || len(have.aliens) > 0 || len(have.chains) != len(desired) {
		return nil, false
	}
	changes := map[string]delta{}
	jumps := 0
	for i := range desired {
		want := &desired[i]
		there := have.chains[want.Name]
		if there == nil || there.owner.Differs(want.Owner) || !pair(want.Rules, there.rules, there.sets, changes) {
			return nil, false
		}
		rules, sets := have.jumpsWithSets(want.Name)
		if !pair(want.Jumps, rules, sets, changes) {
			return nil, false
		}
		jumps += len(rules)
	}
	if len(changes) > 1 || jumps != len(have.jumps) {
		return nil, false
	}
	var deltas []delta
	for _, d := range changes {
		deltas = append(deltas, d)
	}
	return deltas, true
}

func (t *table) jumpsWithSets(name string) (rules []policy.Rule, sets []string) {
	for _, j := range t.jumps {
		if j.target == name {
			rules, sets = append(rules, j.rule), append(sets, j.set)
		}
	}
	return rules, sets
}

// pair compares rules one by one, and collects the changes of the sets in which
// alone they may differ. It reports whether that is so.
func pair(want, have []policy.Rule, sets []string, changes map[string]delta) bool {
	if len(want) != len(have) {
		return false
	}
	for i, w := range want {
		h := have[i]
		if w.Equal(h) {
			continue
		}
		wanted, held := w.To, h.To
		if w.From != nil {
			wanted, held = w.From, h.From
		}
		h.From, h.To = w.From, w.To
		_, again := changes[sets[i]]
		if again || sets[i] == "" || anonymous(sets[i]) || wanted == nil || held == nil || !w.Equal(h) {
			return false
		}
		changes[sets[i]] = delta{set: sets[i], add: wanted.Minus(held), del: held.Minus(wanted)}
	}
	return true
}
