// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	firstBackoff   = time.Second
	longestBackoff = time.Minute
)

// backoff withholds policies whose rules could not be written: to write them is to
// roll them back. The policy of a source is tried again after a time that doubles from
// firstBackoff to longestBackoff; another policy of that source waits for firstBackoff,
// which does not shorten the time.
type backoff struct {
	failed map[policy.SourceID]failure
	next   time.Time // when one that is withheld is tried; zero while none is
}

type failure struct {
	statement policy.SourcePolicy
	err       error
	last      time.Time
	wait      time.Duration
}

// retry makes all policies be tried at once, and leaves the times as they are.
func (b *backoff) retry() {
	for source, f := range b.failed {
		f.last = time.Time{}
		b.failed[source] = f
	}
}

// withhold takes those that are not to be tried yet out of the changed policies, and
// returns why they failed, by source. It forgets sources that changed nothing.
func (b *backoff) withhold(changed []policy.Source, now time.Time) (kept []policy.Source, withheld map[policy.SourceID]error) {
	before := b.failed
	b.failed, b.next, withheld = map[policy.SourceID]failure{}, time.Time{}, map[policy.SourceID]error{}
	for _, c := range changed {
		f, failed := before[c.ID]
		if failed {
			b.failed[c.ID] = f
		}
		wait := f.wait
		if !f.statement.Equal(c.Policy) {
			wait = firstBackoff
		}
		if due := f.last.Add(wait); failed && now.Before(due) {
			withheld[c.ID] = f.err
			b.until(due)
		} else {
			kept = append(kept, c)
		}
	}
	return kept, withheld
}

// note takes note of what came of the policies that were tried.
func (b *backoff) note(tried []policy.Source, failed map[policy.SourceID]error, now time.Time) {
	for _, c := range tried {
		wait := min(max(2*b.failed[c.ID].wait, firstBackoff), longestBackoff)
		delete(b.failed, c.ID)
		if err := failed[c.ID]; err != nil {
			b.failed[c.ID] = failure{c.Policy, err, now, wait}
			b.until(now.Add(wait))
		}
	}
}

func (b *backoff) until(due time.Time) {
	if b.next.IsZero() || due.Before(b.next) {
		b.next = due
	}
}
