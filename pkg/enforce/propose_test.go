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
				c.Order, c.Superseded = int64(len(stored)), rapid.Bool().Draw(t, "yields")
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
