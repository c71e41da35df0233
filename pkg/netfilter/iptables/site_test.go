// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"io/fs"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// nft gives commands to nft, with the family's name for every FAMILY.
func (n *node) nft(f policy.Family, commands ...string) string {
	n.Helper()
	input := strings.ReplaceAll(strings.Join(commands, "\n"), "FAMILY", nflinkFamily(f).String())
	c := exec.Command("nft", "-f", "-")
	c.Stdin = strings.NewReader(input)
	out, err := c.CombinedOutput()
	if err != nil {
		n.Fatalf("nft: %v: %s\n%s", err, out, input)
	}
	return string(out)
}

func (n *node) lacks(f policy.Family) netfilter.Site {
	n.Helper()
	var missing netfilter.Site
	n.idle("Lacks", func() {
		var err error
		if missing, err = n.Lacks(n.Context(), f); err != nil {
			n.Fatal(err)
		}
	})
	return missing
}

func (n *node) vacate(f policy.Family, made netfilter.Site) {
	n.Helper()
	if err := n.Vacate(n.Context(), f, made); err != nil {
		n.Fatal(err)
	}
}

const (
	emptyPostrouting = "add chain FAMILY nat POSTROUTING { type nat hook postrouting priority 100; }"
	emptyPrerouting  = "add chain FAMILY nat PREROUTING { type nat hook prerouting priority -100; }"
)

// TestAsBeforeUs has our chain come and go: what stands then is what stood before.
func TestAsBeforeUs(t *testing.T) {
	for name, tc := range map[string]struct {
		before []string
		lacks  netfilter.Site
	}{
		"nothing":                 {nil, netfilter.SiteTable},
		"another table":           {[]string{"add table FAMILY filter"}, netfilter.SiteTable},
		"an empty table":          {[]string{"add table FAMILY nat"}, netfilter.SiteChain},
		"an empty chain":          {[]string{"add table FAMILY nat", emptyPostrouting}, netfilter.SiteThere},
		"another base chain":      {[]string{"add table FAMILY nat", emptyPrerouting}, netfilter.SiteChain},
		"a chain":                 {[]string{"add table FAMILY nat", "add chain FAMILY nat OTHER"}, netfilter.SiteChain},
		"a rule beside our chain": {[]string{"add table FAMILY nat", emptyPostrouting, "add rule FAMILY nat POSTROUTING oifname x accept"}, netfilter.SiteThere},
		"a rule elsewhere":        {[]string{"add table FAMILY nat", emptyPrerouting, "add rule FAMILY nat PREROUTING iifname x accept"}, netfilter.SiteChain},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, netfilter.VariantNFT)
			made := map[policy.Family]netfilter.Site{}
			for _, f := range policy.Families() {
				n.nft(f, tc.before...)
				if made[f] = n.lacks(f); made[f] != tc.lacks {
					n.Errorf("%s: lacks %q, want %q", f, made[f], tc.lacks)
				}
			}
			before := n.nft(policy.IPv4, "list ruleset")
			want := desired(policy.OwnedBy(owner), basic("X"))
			n.apply(want)
			standing := n.nft(policy.IPv4, "list ruleset")
			for _, f := range policy.Families() {
				if missing := n.lacks(f); missing != netfilter.SiteThere {
					n.Errorf("%s: lacks %q although rules stand", f, missing)
				}
				n.vacate(f, made[f])
			}
			if diff := cmp.Diff(standing, n.nft(policy.IPv4, "list ruleset")); diff != "" {
				n.Fatalf("taken away in use (-before +after):\n%s", diff)
			}
			if err := n.Remove(n.Context(), refs(want), nil); err != nil {
				n.Fatal(err)
			}
			for _, f := range policy.Families() {
				n.vacate(f, made[f])
			}
			if diff := cmp.Diff(before, n.nft(policy.IPv4, "list ruleset")); diff != "" {
				n.Errorf("not as before (-before +after):\n%s", diff)
			}
			n.idle("Vacate once more", func() { n.vacate(policy.IPv4, made[policy.IPv4]) })
		})
	}
}

// TestVacateLeavesWhatOthersUse has the site made by us, and then used by others.
func TestVacateLeavesWhatOthersUse(t *testing.T) {
	stays := func(does string) map[netfilter.Site]string {
		return map[netfilter.Site]string{netfilter.SiteTable: does, netfilter.SiteChain: does}
	}
	const all, none = "stays", "goes"
	chainOnly := map[netfilter.Site]string{netfilter.SiteTable: all, netfilter.SiteChain: none}
	for name, tc := range map[string]struct {
		others []string
		want   map[netfilter.Site]string
	}{
		"nobody":                   {nil, stays(none)},
		"empty chains of iptables": {[]string{emptyPrerouting, "add chain FAMILY nat INPUT { type nat hook input priority 100; }", "add chain FAMILY nat OUTPUT { type nat hook output priority -100; }"}, stays(none)},
		"a rule":                   {[]string{"add rule FAMILY nat POSTROUTING oifname x accept"}, stays(all)},
		"a policy":                 {[]string{"chain FAMILY nat POSTROUTING { policy drop; }"}, stays(all)},
		"a rule elsewhere":         {[]string{emptyPrerouting, "add rule FAMILY nat PREROUTING iifname x accept"}, chainOnly},
		"an empty chain":           {[]string{"add chain FAMILY nat OTHER"}, chainOnly},
		"a set":                    {[]string{"add set FAMILY nat s { type mark; }"}, chainOnly},
		"a counter":                {[]string{"add counter FAMILY nat c"}, chainOnly},
		"a chain of another kind":  {[]string{"add chain FAMILY nat INPUT { type filter hook input priority 0; }"}, chainOnly},
		"a table asleep":           {[]string{"add table FAMILY nat { flags dormant; }"}, chainOnly},
	} {
		for made, does := range tc.want {
			t.Run(name+", made the "+string(made), func(t *testing.T) {
				n := newNode(t, netfilter.VariantNFT)
				for _, f := range policy.Families() {
					n.nft(f, append([]string{"add table FAMILY nat", emptyPostrouting}, tc.others...)...)
				}
				for _, f := range policy.Families() {
					before := n.nft(f, "list ruleset")
					generation := n.generation()
					n.vacate(f, made)
					if stayed := n.generation() == generation; stayed != (does == all) {
						n.Errorf("%s: something was written: %v, want that it %s", f, !stayed, does)
					}
					gone := netfilter.SiteTable
					if does == all {
						if diff := cmp.Diff(before, n.nft(f, "list ruleset")); diff != "" {
							n.Errorf("%s (-before +after):\n%s", f, diff)
						}
						continue
					}
					if made == netfilter.SiteChain {
						gone = netfilter.SiteChain
					}
					if missing := n.lacks(f); missing != gone {
						n.Errorf("%s: the %s is gone, not the %s:\n%s", f, missing, gone, n.nft(f, "list ruleset"))
					}
				}
			})
		}
	}
}

// TestVacateLosesNoRule has others add a rule at the same moment: it stands, or
// they were told that there is no chain for it.
func TestVacateLosesNoRule(t *testing.T) {
	n := newNode(t, netfilter.VariantNFT)
	others, err := nfnetlink.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer others.Close()
	outcomes := map[string]int{}
	for range 100 {
		n.nft(policy.IPv4, "add table ip nat", "delete table ip nat", "add table ip nat", emptyPostrouting)
		added := make(chan error)
		go func() {
			var b nfnetlink.Batch
			b.AddRule(nfnetlink.IPv4, natTable, postrouting, []nfnetlink.Expr{nfnetlink.Verdict{Code: nfnetlink.Return}}, "theirs")
			added <- others.Commit(&b)
		}()
		n.vacate(policy.IPv4, netfilter.SiteTable)
		errAdded := <-added
		stands := strings.Contains(n.nft(policy.IPv4, "list ruleset"), "theirs")
		switch {
		case errAdded == nil && stands:
			outcomes["it stands"]++
		case errors.Is(errAdded, fs.ErrNotExist) && !stands:
			outcomes["they were told"]++
		default:
			t.Fatalf("they got %v, and the rule stands: %v", errAdded, stands)
		}
	}
	t.Log(outcomes)
	if len(outcomes) < 2 {
		t.Errorf("there was no race: %v", outcomes)
	}
}

func TestSiteOfLegacy(t *testing.T) {
	n := newNode(t, netfilter.VariantLegacy)
	for _, f := range policy.Families() {
		if missing := n.lacks(f); missing != netfilter.SiteThere {
			t.Errorf("%s: lacks %q", f, missing)
		}
		if used, err := legacyInUse(f, natTable); err != nil || used {
			t.Errorf("%s: to ask made the table: %v, %v", f, used, err)
		}
		n.nft(f, "add table FAMILY nat", emptyPostrouting) // is the other variant's
		n.idle("Vacate", func() { n.vacate(f, netfilter.SiteTable) })
	}
}
