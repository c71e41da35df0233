// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestPlacesKeepRuns(t *testing.T) {
	p := policy.Places{}
	for i := range 3 {
		p.Note("nonMasqueradeCIDRs", "/etc/config/ip-masq-agent", i)
	}
	p.Note("nonMasqueradeCIDRs", "/etc/config/ip-masq-more", 1)
	p.Note("enableIPv6", "/etc/config/ip-masq-more", -1)
	want := policy.Places{
		"nonMasqueradeCIDRs": {{File: "/etc/config/ip-masq-agent", First: 0, Count: 3}, {File: "/etc/config/ip-masq-more", First: 1, Count: 1}},
		"enableIPv6":         {{File: "/etc/config/ip-masq-more", First: -1, Count: 1}},
	}
	if diff := cmp.Diff(want, p); diff != "" {
		t.Error(diff)
	}
	if at, found := p.Of("enableIPv6", -1); !found || at.String() != "/etc/config/ip-masq-more" {
		t.Errorf("enableIPv6 is at %v, %t", at, found)
	}
	if at, found := p.Of("nonMasqueradeCIDRs", 4); found {
		t.Errorf("an item that is not there is at %v", at)
	}
}

// What was noted of each item is what is found of it.
func TestPlacesOfEachItem(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := policy.Places{}
		var noted []policy.Place
		for range rapid.IntRange(0, 50).Draw(t, "items") {
			at := policy.Place{File: fmt.Sprint(rapid.IntRange(0, 2).Draw(t, "file")), Index: rapid.IntRange(0, 5).Draw(t, "index")}
			noted = append(noted, at)
			p.Note("list", at.File, at.Index)
		}
		for i, want := range noted {
			if got, found := p.Of("list", i); !found || got != want {
				t.Fatalf("item %d is at %v, %t; it was noted at %v", i, got, found, want)
			}
		}
	})
}
