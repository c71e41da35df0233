// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"reflect"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// backoff withholds policies whose rules could not be written, as each try means a rollback. The
// policy of a source is tried again after a time that doubles from firstRetry to lastRetry.
// Another policy of that source waits for firstRetry, and does not shorten the time.
type backoff struct {
	failed map[policy.SourceID]failure
	next   time.Time // when the first withheld policy is due; zero if none is withheld
}

type failure struct {
	policies []policy.SourcePolicy
	err      error
	last     time.Time
	wait     time.Duration
}

// retry makes all policies due now.
func (b *backoff) retry() {
	for source, f := range b.failed {
		f.last = time.Time{}
		b.failed[source] = f
	}
}

// split splits the changed policies into those that are due and those that are not, with the
// error of their last try. It forgets the sources that did not change.
func (b *backoff) split(changed []policy.Source, now time.Time) (due []policy.Source, withheld map[policy.SourceID]error) {
	before := b.failed
	b.failed, b.next, withheld = map[policy.SourceID]failure{}, time.Time{}, map[policy.SourceID]error{}
	for _, c := range changed {
		f, failed := before[c.ID]
		if failed {
			b.failed[c.ID] = f
		}
		wait := f.wait
		if !reflect.DeepEqual(f.policies, c.Policies()) {
			wait = firstRetry
		}
		if at := f.last.Add(wait); failed && now.Before(at) {
			withheld[c.ID] = f.err
			b.until(at)
		} else {
			due = append(due, c)
		}
	}
	return due, withheld
}

// note takes note of the outcome of the policies that were tried.
func (b *backoff) note(tried []policy.Source, failed map[policy.SourceID]error, now time.Time) {
	for _, c := range tried {
		wait := min(max(2*b.failed[c.ID].wait, firstRetry), lastRetry)
		delete(b.failed, c.ID)
		if err := failed[c.ID]; err != nil {
			b.failed[c.ID] = failure{c.Policies(), err, now, wait}
			b.until(now.Add(wait))
		}
	}
}

func (b *backoff) until(due time.Time) {
	if b.next.IsZero() || due.Before(b.next) {
		b.next = due
	}
}
