// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

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
}
