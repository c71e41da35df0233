// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// everywhere is a conf directory that has all networks.
type everywhere struct{}

func (everywhere) HasEntry(string) bool                          { return true }
func (everywhere) LacksEntry(string) bool                        { return false }
func (everywhere) HasEntryWith(string, policy.SourcePolicy) bool { return false }

func conflists() enforce.Conflists { return everywhere{} }
func ignored(error)                {}
func sourcesOf(errs map[policy.SourceID]error) (s []string) {
	for source := range errs {
		s = append(s, source.Name)
	}
	slices.Sort(s)
	return s
}

// inForce writes who states what, whatever the order that newcomers got.
func inForce(list []policy.Source) string {
	list = slices.SortedFunc(slices.Values(list), func(a, b policy.Source) int { return a.ID.Compare(b.ID) })
	text := ""
	for _, c := range list {
		text += fmt.Sprintln(c.ID, c.Superseded, c.Policy.Chain, c.Policy.NonMasqueradeCIDRs, c.Policy.MasqueradeCIDRs, c.Policy.RandomFully != nil && *c.Policy.RandomFully)
	}
	return text
}

func genNetwork(name string) *rapid.Generator[policy.Source] {
	return rapid.Custom(func(t *rapid.T) policy.Source {
		prefix := netip.MustParsePrefix(rapid.SampledFrom([]string{"10.0.0.0/8", "10.1.0.0/16", "10.2.0.0/16"}).Draw(t, "prefix"))
		c := network(name, rapid.SampledFrom([]string{"A", "A", "B"}).Draw(t, "chain"))
		c.Policy.NonMasqueradeCIDRs = nil
		if rapid.Bool().Draw(t, "exempt") {
			c.Policy.NonMasqueradeCIDRs = []netip.Prefix{prefix}
		} else {
			c.Policy.MasqueradeCIDRs = []netip.Prefix{prefix}
		}
		if rapid.Bool().Draw(t, "states randomFully") {
			c.Policy.RandomFully = new(bool)
			*c.Policy.RandomFully = rapid.Bool().Draw(t, "randomFully")
		}
		return c
	})
}

// What comes of all at once is what comes of one after the other, where no
// stored network changes or is gone from the disk: of newcomers that conflict it
// does not matter then which is asked first.
func TestAddAllIsAddOfEach(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var stored, all []policy.Source
		for i := range rapid.IntRange(0, 7).Draw(t, "networks") {
			c := genNetwork(fmt.Sprint("n", i)).Draw(t, "network")
			all = append(all, c)
			if rapid.Bool().Draw(t, "stored") {
				c.Order, c.Superseded = int64(len(stored)), rapid.Bool().Draw(t, "superseded")
				stored = append(stored, c)
			}
		}
		atOnce, each := enforce.Proposal{Sources: stored}, enforce.Proposal{Sources: stored}
		errs := atOnce.AddAll(all, conflists, ignored)
		refused := map[policy.SourceID]error{}
		for _, c := range all {
			if err := each.Add(c, conflists, ignored); err != nil {
				refused[c.ID] = err
			}
		}
		if got, want := sourcesOf(errs), sourcesOf(refused); !slices.Equal(got, want) {
			t.Fatalf("refused are %q, and one by one %q", got, want)
		}
		if got, want := inForce(atOnce.Sources), inForce(each.Sources); got != want {
			t.Fatalf("in force are\n%sand one by one\n%s", got, want)
		}
	})
}

// onDisk is a conf directory in which every network has this policy.
type onDisk struct {
	everywhere
	policy policy.SourcePolicy
}

func (d onDisk) HasEntryWith(_ string, s policy.SourcePolicy) bool { return d.policy.Equal(s) }

func TestPodSubnetsAreKept(t *testing.T) {
	subnets := func(list ...string) (p []netip.Prefix) {
		for _, s := range list {
			p = append(p, netip.MustParsePrefix(s))
		}
		return p
	}
	stored, other := network("net", "A"), network("other", "A")
	stored.PodSubnets, stored.Order, other.Order = subnets("10.1.2.0/24"), 1, 2
	changed := network("net", "A")
	changed.Policy.MasqueradeCIDRs = subnets("10.9.0.0/16")
	same := network("net", "A")
	with := func(s policy.Source, list ...string) policy.Source {
		s.PodSubnets = subnets(list...)
		return s
	}
	var many []string
	for i := range policy.MaxPodCIDRs {
		many = append(many, fmt.Sprintf("10.%d.%d.0/24", i>>8, i&255))
	}
	for name, c := range map[string]struct {
		add     policy.Source
		stale   bool
		want    []string
		order   int64
		changes int
	}{
		"unchanged":                 {with(same, "10.1.2.0/24"), false, []string{"10.1.2.0/24"}, 1, 0},
		"new subnet":                {with(same, "10.0.3.0/24", "fd00:1::/64"), false, []string{"10.0.3.0/24", "10.1.2.0/24", "fd00:1::/64"}, 1, 1},
		"the conflist's":            {same, false, []string{"10.1.2.0/24"}, 1, 0},
		"changed policy":            {changed, false, []string{"10.1.2.0/24"}, 3, 1},
		"changed policy and subnet": {with(changed, "10.0.3.0/24"), false, []string{"10.0.3.0/24", "10.1.2.0/24"}, 3, 1},
		"stale":                     {with(changed, "10.0.3.0/24"), true, []string{"10.1.2.0/24"}, 1, 0},
		"too many":                  {with(same, many...), false, many, 1, 1},
		"even more":                 {with(same, append(many, "10.99.0.0/16")...), false, []string{"10.1.2.0/24"}, 1, 0},
	} {
		disk := func() enforce.Conflists { return everywhere{} }
		if c.stale {
			disk = func() enforce.Conflists { return onDisk{policy: stored.Policy} }
		}
		p := enforce.Proposal{Sources: []policy.Source{stored, other}}
		if err := p.Add(c.add, disk, ignored); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got := p.Find(stored.ID)
		if !slices.Equal(got.PodSubnets, subnets(c.want...)) || got.Order != c.order || len(p.Changed) != c.changes {
			t.Errorf("%s: %s, order %d, %d changed; want %s, %d, %d", name, got.PodSubnets, got.Order, len(p.Changed), c.want, c.order, c.changes)
		}
		if !slices.Equal(stored.PodSubnets, subnets("10.1.2.0/24")) {
			t.Fatalf("%s: the stored source has %s", name, stored.PodSubnets)
		}
	}
	p := enforce.Proposal{Sources: []policy.Source{stored, other}}
	p.AddAll([]policy.Source{changed, other}, conflists, ignored)
	if got := p.Find(stored.ID); !slices.Equal(got.PodSubnets, stored.PodSubnets) || !got.Policy.Equal(changed.Policy) {
		t.Errorf("AddAll: %+v", got)
	}
}
