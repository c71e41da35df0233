// SPDX-License-Identifier: Apache-2.0

package policy

import "slices"

// TransitionGuards returns the guards for the time in which masquerade rules change. A guard
// that is in the kernel matches what both policies masquerade, and binds what neither does.
// One that is not there begins before the first rules of its chain, else after the new ones.
// Guards that are no longer desired are not among them.
//
// exists reports whether the kernel has a masquerade chain; "" is any.
func TransitionGuards(observed, desired []Guard, exists func(chain string, f Family) bool) []Guard {
	var out []Guard
	for _, g := range desired {
		i := slices.IndexFunc(observed, func(o Guard) bool { return o.Chain == g.Chain && o.Family == g.Family })
		switch {
		case i < 0 && exists(g.Chain, g.Family):
			continue
		case i >= 0:
			old := observed[i]
			old.Scope.Sources = orEmpty(old.Scope.Sources)
			g.Exempt = Normalize(slices.Concat(g.Exempt, old.Exempt))
			if old.Mode == GuardOff {
				g.Mode = GuardOff
			}
			if old.Bound == nil {
				g.Bound, g.ExemptPods = nil, nil
			} else if g.Bound != nil {
				g.Bound = g.Bound.Intersect(old.Bound)
				g.ExemptPods = orEmpty(g.ExemptPods).Intersect(orEmpty(old.ExemptPods))
			}
			var some bool
			if g.Scope, some = g.Scope.common(old.Scope); !some || g.Mode == GuardOff && g.Bound == nil {
				continue
			}
		case g.Bound != nil && exists("", g.Family): // that chain may masquerade what is to be bound
			if g.Bound, g.ExemptPods = nil, nil; g.Mode == GuardOff {
				continue
			}
		}
		out = append(out, g)
	}
	return out
}

func orEmpty(r Ranges) Ranges {
	if r == nil {
		return Ranges{}
	}
	return r
}
