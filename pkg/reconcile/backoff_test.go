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
	source := policy.Source{Kind: policy.AgentFiles}
	states := func(cidr string) []policy.Contribution {
		s := policy.Statement{Chain: policy.DefaultChain, NonMasqueradeCIDRs: []netip.Prefix{netip.MustParsePrefix(cidr)}}
		return []policy.Contribution{{Source: source, Statement: s}}
	}
	same, other := states("10.0.0.0/8"), states("20.0.0.0/8")
	failed := map[policy.Source]error{source: errors.New("not today")}
	now := time.Now()
	var b backoff
	tried := func(c []policy.Contribution) bool {
		kept, withheld := b.withhold(c, now)
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
	// Another statement waits for a second, and does not shorten the wait.
	b.note(same, failed, now)
	if tried(other) {
		t.Error("another statement is tried at once")
	}
	if now = now.Add(firstBackoff); !tried(other) {
		t.Error("another statement is not tried after a second")
	}
	b.note(other, failed, now)
	if now = now.Add(longestBackoff - 1); tried(other) {
		t.Error("the wait was shortened")
	}
	b.retry()
	if !tried(other) {
		t.Error("not tried on request")
	}
	// What came into force, or is not asked for any more, is forgotten.
	b.note(other, nil, now)
	if b.note(same, failed, now); tried(same) || b.wait != longestBackoff {
		t.Errorf("wait %s", b.wait)
	}
	tried(nil)
	if !tried(same) || b.wait != 0 || !b.next.IsZero() {
		t.Errorf("wait %s, next %s", b.wait, b.next)
	}
}
