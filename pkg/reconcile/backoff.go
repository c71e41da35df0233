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
// roll them back. The same policy is tried again after a time that doubles from
// firstBackoff to longestBackoff; a source that states another policy waits for
// firstBackoff at most, which does not shorten that time.
type backoff struct {
	failed map[policy.Source]failure
	wait   time.Duration
	last   time.Time // when policies failed
	next   time.Time // when one that is withheld is tried; zero while none is
}

type failure struct {
	statement policy.Statement
	err       error
}

// retry makes all policies be tried at once, and leaves the time as it is.
func (b *backoff) retry() { b.last = time.Time{} }

// withhold takes those that are not to be tried yet out of the changed policies, and
// returns why they failed, by source.
func (b *backoff) withhold(changed []policy.Contribution, now time.Time) (kept []policy.Contribution, failed map[policy.Source]error) {
	b.next = time.Time{}
	stated := map[policy.Source]bool{}
	for _, c := range changed {
		f, isFailed := b.failed[c.Source]
		stated[c.Source] = isFailed
		wait := b.wait
		if !f.statement.Equal(c.Statement) {
			wait = firstBackoff
		}
		due := b.last.Add(wait)
		if !isFailed || !now.Before(due) {
			kept = append(kept, c)
			continue
		}
		if failed == nil {
			failed = map[policy.Source]error{}
		}
		failed[c.Source] = f.err
		if b.next.IsZero() || due.Before(b.next) {
			b.next = due
		}
	}
	for source := range b.failed {
		if !stated[source] {
			delete(b.failed, source)
		}
	}
	if len(b.failed) == 0 {
		b.wait = 0
	}
	return kept, failed
}

// note takes note of what came of the policies that were tried.
func (b *backoff) note(tried []policy.Contribution, failed map[policy.Source]error, now time.Time) {
	for _, c := range tried {
		delete(b.failed, c.Source)
		if err := failed[c.Source]; err != nil {
			if b.failed == nil {
				b.failed = map[policy.Source]failure{}
			}
			b.failed[c.Source] = failure{c.Statement, err}
		}
	}
	if len(failed) > 0 {
		b.wait = min(max(2*b.wait, firstBackoff), longestBackoff)
		b.last = now
		b.next = now.Add(b.wait)
	}
}
