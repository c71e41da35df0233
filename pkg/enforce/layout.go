// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"fmt"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// layoutOf returns the form of the rules in a backend. What the host's program cannot write is on record: the
// reconciler may have another version of the program, and would ask for rules that the plugin takes back.
func layoutOf(b netfilter.Backend, c netfilter.Choice, rec store.Record) policy.Layout {
	l := b.Layout()
	l.NoRandomFully = rec.NoRandomFully && c.Variant == netfilter.VariantLegacy
	return l
}

// limitLayouts leaves out of the desired rules what the host's programs cannot write. It reports whether that
// changed any. It asks a program only where rules differ: an ADD with correct rules runs none.
func (e *Enforcer) limitLayouts(ctx context.Context, s *State) (changed bool) {
	for i := range s.observed.tables {
		t := &s.observed.tables[i]
		if t.layout.NoRandomFully || !s.rulesDiffer(t) {
			continue
		}
		b, err := e.Drivers.Open(t.choice)
		if err != nil {
			continue // it is an error of the chains, too
		}
		supported, err := b.Supported(ctx)
		// Without the program nothing is written, for a reason of its own.
		if err != nil || supported == t.layout {
			continue
		}
		t.layout = supported
		changed = true
	}
	if changed {
		e.desireChains(s, recordedPods)
	}
	return changed
}

// noRandomFully reports whether rules lack random source ports because a program cannot write them.
func (s *State) noRandomFully() bool {
	for i := range s.observed.tables {
		if s.observed.tables[i].layout.NoRandomFully {
			return true
		}
	}
	return false
}

// WithoutRandomPorts returns the chains that ask for randomFully and do not get it.
func (s *State) WithoutRandomPorts() []error {
	var errs []error
	for _, c := range s.Chains {
		t := s.tablesOf(c.Choice)
		if t == nil || !t.layout.NoRandomFully || !c.Policy.RandomFully.Value {
			continue
		}
		errs = append(errs, fmt.Errorf("chain %s has no random source ports: "+
			"the host's iptables is older than 1.6.2 and has "+
			"no --random-fully; install a later version, set randomFully to false, or use backend nftables",
			c.Policy.Chain))
	}
	return errs
}

// LayoutOf returns the form of the rules in a backend, as far as it is known without running a program.
func (s *State) LayoutOf(b netfilter.Backend, c netfilter.Choice) policy.Layout {
	return layoutOf(b, c, s.onRecord.now)
}
