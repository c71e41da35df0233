// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"net/netip"
	"slices"
	"sort"

	"go4.org/netipx"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Owned returns what thirdparty.Scan asks: whether a chain is owned, by the view, which
// may be nil, by the record, or by the comment in it.
func Owned(v *enforce.State, rec store.Record, dataDir string) func(thirdparty.Place) bool {
	// The tables of the backends.
	const iptablesTable, nftablesTable = "nat", "ip-masq"
	inIPTables := map[string]bool{}
	for _, o := range rec.Chains {
		inIPTables[o.Chain] = inIPTables[o.Chain] || o.Backend == policy.IPTables
	}
	if v != nil {
		for _, g := range v.Groups {
			for _, c := range g.Desired.Chains {
				inIPTables[c.Name] = inIPTables[c.Name] || g.Choice.Backend == policy.IPTables
			}
		}
	}
	return func(p thirdparty.Place) bool {
		return p.Table == nftablesTable || p.Table == iptablesTable && inIPTables[p.Chain] ||
			p.Owner.Schema > policy.RulesSchema || p.Owner.DataDir != "" && p.Owner.DataDir == policy.OwnedBy(dataDir).DataDir
	}
}

// Catch is a rule of others that masquerades what a policy leaves alone.
type Catch struct {
	Rule  thirdparty.Rule
	Chain string // of the policy
	// Destinations and Sources are the entries of the policy that exempt what
	// the rule masquerades, in part at least.
	Destinations, Sources []policy.Entry
	Scoped                bool // the policy names the sources that it is about

	number int // of the rule
}

// Caught returns which rules of others masquerade what which policy leaves
// alone, by rule and then by policy. A rule that is not Exact may be less than
// it seems.
func Caught(policies []policy.Policy, rules []thirdparty.Rule) []Catch {
	var about []subject
	for _, p := range policies {
		for _, f := range p.Families() {
			if from, managed := scope(p, f); managed {
				about = append(about, subject{p, f, from, exemptAddresses(p, f)})
			}
		}
	}
	var caught []Catch
	for i, r := range rules {
		for _, s := range about {
			if c := s.catch(r); len(c.Destinations)+len(c.Sources) > 0 {
				c.number = i
				caught = append(caught, c)
			}
		}
	}
	return caught
}

// CountThirdParty returns how many rules of others masquerade what a policy leaves
// alone, of those that could be read in full.
func CountThirdParty(policies []policy.Policy, rules []thirdparty.Rule) int {
	counted := map[int]bool{}
	for _, c := range Caught(policies, rules) {
		if c.Rule.Exact {
			counted[c.number] = true
		}
	}
	return len(counted)
}

// subject is what a policy says of one family.
type subject struct {
	policy.Policy
	family       policy.Family
	from, exempt policy.Ranges
}

func (s subject) catch(r thirdparty.Rule) Catch {
	c := Catch{Rule: r, Chain: s.Chain, Scoped: len(s.Sources.Value) > 0}
	if r.Family != s.family || r.Match.Out == "lo" || !leavesThrough(s.Policy, r) {
		return c
	}
	caught := s.exempt.Intersect(r.Destinations(s.from))
	for _, e := range s.Destinations {
		if e.Action == policy.Exempt && touches(caught, e.Prefix) {
			c.Destinations = append(c.Destinations, e)
		}
	}
	for _, e := range s.ExemptSources {
		if policy.FamilyOf(e.Prefix.Addr()) == s.family && len(r.Destinations(policy.RangesOf(e.Prefix).Intersect(s.from))) > 0 {
			c.Sources = append(c.Sources, e)
		}
	}
	return c
}

// touches reports whether an address of the prefix is in the set. Lists are
// long: it searches by halves.
func touches(r policy.Ranges, p netip.Prefix) bool {
	covered := netipx.RangeOfPrefix(p)
	i := sort.Search(len(r), func(i int) bool { return !r[i].To().Less(covered.From()) })
	return i < len(r) && r[i].Overlaps(covered)
}

// scope returns the sources of a family that the policy is about, nil being any.
// It is false where it is about none.
func scope(p policy.Policy, f policy.Family) (policy.Ranges, bool) {
	if !slices.Contains(p.Families(), f) {
		return nil, false
	}
	if len(p.Sources.Value) == 0 {
		return nil, true
	}
	var sources []netip.Prefix
	for _, prefix := range p.Sources.Value {
		if policy.FamilyOf(prefix.Addr()) == f {
			sources = append(sources, prefix)
		}
	}
	return policy.RangesOf(sources...), len(sources) > 0
}

func leavesThrough(p policy.Policy, r thirdparty.Rule) bool {
	return len(p.Interfaces.Value) == 0 || slices.ContainsFunc(p.Interfaces.Value, r.Match.Leaves)
}

// exemptAddresses returns the destinations of a family that the policy leaves
// alone, as the rules have them.
func exemptAddresses(p policy.Policy, f policy.Family) policy.Ranges {
	desired := policy.Desired([]policy.Policy{p}, policy.Layout{Sets: true}, policy.Owner{})
	exempt := policy.Ranges{}
	if c := desired.Find(f, p.Chain); c != nil {
		for _, r := range c.Rules {
			if r.Verdict == policy.Return && r.From == nil {
				exempt = policy.RangesOf(f.All()).Intersect(r.To)
			}
		}
	}
	return exempt
}

func meet(r, s policy.Ranges) bool { return len(r.Intersect(s)) > 0 }

// sameInterface reports whether one interface can be meant by both lists, of
// which an empty one means any.
func sameInterface(p, q []string) bool {
	if len(p) == 0 || len(q) == 0 {
		return true
	}
	for _, pattern := range p {
		if slices.ContainsFunc(q, thirdparty.Packets{Out: pattern}.Leaves) {
			return true
		}
	}
	return false
}
