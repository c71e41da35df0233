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
	failed map[policy.Source]failure
	next   time.Time // when one that is withheld is tried; zero while none is
}

type failure struct {
	statement policy.Statement
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
func (b *backoff) withhold(changed []policy.Contribution, now time.Time) (kept []policy.Contribution, withheld map[policy.Source]error) {
	before := b.failed
	b.failed, b.next, withheld = map[policy.Source]failure{}, time.Time{}, map[policy.Source]error{}
	for _, c := range changed {
		f, failed := before[c.Source]
		if failed {
			b.failed[c.Source] = f
		}
		wait := f.wait
		if !f.statement.Equal(c.Statement) {
			wait = firstBackoff
		}
		if due := f.last.Add(wait); failed && now.Before(due) {
			withheld[c.Source] = f.err
			b.until(due)
		} else {
			kept = append(kept, c)
		}
	}
	return kept, withheld
}

// note takes note of what came of the policies that were tried.
func (b *backoff) note(tried []policy.Contribution, failed map[policy.Source]error, now time.Time) {
	for _, c := range tried {
		wait := min(max(2*b.failed[c.Source].wait, firstBackoff), longestBackoff)
		delete(b.failed, c.Source)
		if err := failed[c.Source]; err != nil {
			b.failed[c.Source] = failure{c.Statement, err, now, wait}
			b.until(now.Add(wait))
		}
	}
}

func (b *backoff) until(due time.Time) {
	if b.next.IsZero() || due.Before(b.next) {
		b.next = due
	}
}
