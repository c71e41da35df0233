// SPDX-License-Identifier: Apache-2.0

package reconcile

import "time"

const (
	// apart is how far passes are apart that events ask for: our own commits
	// and those of others come in groups. It bounds what a storm of foreign
	// commits can cost, and how long a repair can wait.
	apart = 20 * time.Millisecond
	// firstRetry is when a pass that failed is made again; then the time
	// doubles, up to the interval.
	firstRetry = apart
)

// pace decides when the next pass is due.
type pace struct {
	ended time.Time     // the last pass or dry run
	next  time.Time     // the next one, if nothing happens
	retry time.Duration // 0 while passes do not fail
	pause time.Duration // 0 unless a rival is about
}

// after takes note of a pass. A backoff that is not zero is when policies that are
// withheld are tried again.
func (p *pace) after(now time.Time, r *Report, pause, interval time.Duration, backoff time.Time) {
	p.ended, p.pause, p.next = now, pause, now.Add(interval)
	switch {
	case !r.rulesFailed() || r.undone():
		p.retry = 0
	case p.retry == 0:
		p.retry = min(firstRetry, interval)
	default:
		p.retry = min(2*p.retry, interval)
	}
	if p.retry > 0 {
		p.next = now.Add(p.retry)
	}
	if !backoff.IsZero() {
		p.next = earlier(p.next, backoff)
	}
}

// due returns when the next pass is to be made, for the causes there are by now.
func (p *pace) due(c cause) time.Time {
	next := p.next
	if !c.none() {
		next = earlier(next, p.ended.Add(apart))
	}
	if p.pause > 0 && !c.files && !c.asked {
		next = earlier(next, p.ended.Add(3*p.pause)) // then it shows whether the rival is gone
		if first := p.ended.Add(p.pause); next.Before(first) {
			next = first
		}
	}
	return next
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
