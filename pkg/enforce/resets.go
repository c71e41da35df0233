// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"reflect"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// policyChange is the sources before and after a change of policies.
type policyChange struct{ before, after []policy.Source }

// changeOf returns the change, or nil if what the sources ask for stays the same.
func changeOf(before, after []policy.Source) *policyChange {
	same := func(s policy.Source) bool {
		t := store.State{Sources: before}.Find(s.ID)
		return t != nil && s.Superseded == t.Superseded && s.Policy.Equal(t.Policy) && reflect.DeepEqual(s.Files, t.Files)
	}
	if len(before) == len(after) && !slices.ContainsFunc(after, func(s policy.Source) bool { return !same(s) }) {
		return nil
	}
	return &policyChange{before, after}
}

// resetsOf returns the resets that are due after the rules are written: those on record, and those for
// what is about to be written.
func resetsOf(s *State) []store.Reset {
	resets := s.record.Resets
	if !slices.ContainsFunc(s.Policies, policy.Policy.ResetsConnections) {
		return resets
	}
	recorded := func(g Group) bool { return g.Recorded && len(g.Diff) > 0 }
	untranslated := len(s.record.Chains) == 0 || s.change == nil && slices.ContainsFunc(s.Groups, recorded)
	if c := s.change; c != nil {
		// Removing a network deletes no connection.
		remaining := slices.DeleteFunc(slices.Clone(c.before), func(b policy.Source) bool {
			return store.State{Sources: c.after}.Find(b.ID) == nil
		})
		differs := changeOf(remaining, c.after) != nil && len(s.rulesDiff())+len(s.Stale) > 0
		untranslated = untranslated || newlyDrops(s.Policies, c.before) || differs && len(remaining) == 0
		if differs && len(remaining) > 0 {
			resets = addReset(resets, remaining)
		}
	}
	if untranslated {
		resets = addReset(resets, nil)
	}
	return resets
}

// newlyDrops reports whether a policy has guard "drop" whose chain did not have it before.
func newlyDrops(policies []policy.Policy, before []policy.Source) bool {
	drops := func(p policy.Policy) bool { return p.Guard.Value == policy.GuardDrop }
	if !slices.ContainsFunc(policies, drops) {
		return false
	}
	old := policy.Merge(before)
	return slices.ContainsFunc(policies, func(p policy.Policy) bool {
		return drops(p) && !slices.ContainsFunc(old, func(o policy.Policy) bool { return o.Chain == p.Chain && drops(o) })
	})
}

// addReset adds a reset, or renews an equal one: a walk that runs already may have passed entries that
// the rules to come contradict.
func addReset(resets []store.Reset, before []policy.Source) []store.Reset {
	resets = slices.DeleteFunc(slices.Clone(resets), func(r store.Reset) bool {
		return (r.Before == nil) == (before == nil) && reflect.DeepEqual(r.Before, before)
	})
	if len(resets) == store.MaxResets {
		resets = slices.Delete(resets, 0, 1)
	}
	at := bootTime()
	if n := len(resets); n > 0 {
		at = max(at, resets[n-1].At+1)
	}
	return append(resets, store.Reset{At: at, Before: before})
}

// bootTime returns the time since the boot in nanoseconds.
func bootTime() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) // supported since Linux 2.6.39
	return max(1, t.Nano())
}
