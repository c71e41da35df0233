// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestBackoff(t *testing.T) {
	source := policy.SourceID{Kind: policy.AgentFiles}
	states := func(cidr string) []policy.Source {
		s := policy.SourcePolicy{Chain: policy.DefaultChain, NonMasqueradeCIDRs: []netip.Prefix{netip.MustParsePrefix(cidr)}}
		return []policy.Source{{ID: source, Policy: s}}
	}
	same, other := states("10.0.0.0/8"), states("20.0.0.0/8")
	failed := map[policy.SourceID]error{source: errors.New("not today")}
	now := time.Now()
	var b backoff
	tried := func(c []policy.Source) bool {
		kept, withheld := b.split(c, now)
		if len(kept)+len(withheld) != len(c) {
			t.Fatalf("kept %v, withheld %v", kept, withheld)
		}
		return len(kept) > 0
	}
	for _, wait := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		wait *= time.Second
		if !tried(same) {
			t.Fatalf("not tried before a wait of %s", wait)
		}
		b.note(same, failed, now)
		now = now.Add(wait - 1)
		if tried(same) || b.next.Sub(now) != 1 {
			t.Errorf("tried before %s, or next in %s", wait, b.next.Sub(now))
		}
		now = now.Add(1)
	}
	// Another policy waits for a second, and does not shorten the wait.
	b.note(same, failed, now)
	if tried(other) {
		t.Error("another policy is tried at once")
	}
	if now = now.Add(firstRetry); !tried(other) {
		t.Error("another policy is not tried after a second")
	}
	b.note(other, failed, now)
	if now = now.Add(lastRetry - 1); tried(other) {
		t.Error("the wait was shortened")
	}
	b.retry()
	if !tried(other) {
		t.Error("not tried on request")
	}
	// What came into force, or is not asked for any more, is forgotten.
	for _, forget := range []func(){func() { b.note(other, nil, now) }, func() { tried(nil) }} {
		b.note(same, failed, now)
		if forget(); !tried(same) || !b.next.IsZero() {
			t.Errorf("not tried at once, or next %s", b.next)
		}
		if b.note(same, failed, now); tried(same) || b.next.Sub(now) != firstRetry {
			t.Errorf("tried, or next in %s", b.next.Sub(now))
		}
	}
}

// A source whose policy changes and fails again and again does not keep that of
// another source from being tried.
func TestBackoffOfEachSource(t *testing.T) {
	at := func(network string, i byte) policy.Source {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, i}), 16)
		return policy.Source{
			ID:     policy.SourceID{Kind: policy.Network, Name: network},
			Policy: policy.SourcePolicy{Chain: network, NonMasqueradeCIDRs: []netip.Prefix{p}},
		}
	}
	failed := map[policy.SourceID]error{}
	for _, network := range []string{"steady", "flapping"} {
		failed[at(network, 0).ID] = errors.New("not today")
	}
	now := time.Now()
	var b backoff
	tries := 0
	for i := range byte(200) {
		kept, _ := b.split([]policy.Source{at("steady", 0), at("flapping", i)}, now)
		of := map[policy.SourceID]error{}
		for _, c := range kept {
			of[c.ID] = failed[c.ID]
			if c.ID.Name == "steady" {
				tries++
			}
		}
		b.note(kept, of, now)
		now = now.Add(firstRetry)
	}
	if want := 9; tries != want { // after 0, 1, 3, 7, 15, 31, 63, 123 and 183 s
		t.Errorf("tried %d times in 200 s, want %d", tries, want)
	}
}
