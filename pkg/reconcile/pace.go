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
	ended    time.Time
	interval time.Duration
	retry    time.Duration // 0 while passes do not fail
	pause    time.Duration // 0 unless a rival is about
}

// after takes note of a pass.
func (p *pace) after(now time.Time, r *Report, pause, interval time.Duration) {
	p.ended, p.interval, p.pause = now, interval, pause
	switch {
	case r.Result != Failed || r.undone():
		p.retry = 0
	case p.retry == 0:
		p.retry = min(firstRetry, interval)
	default:
		p.retry = min(2*p.retry, interval)
	}
}

// due returns when the next pass is to be made, for the causes there are by now.
func (p *pace) due(c cause) time.Time {
	wait := p.interval
	if p.retry > 0 {
		wait = p.retry
	}
	switch {
	case c.files || c.asked:
		wait = min(wait, apart)
	case c.rules && p.retry == 0:
		wait = min(wait, apart) // what fails is not tried at the pace of events
	}
	if p.pause > 0 && !c.files && !c.asked {
		wait = max(p.pause, min(wait, 3*p.pause)) // then it shows whether the rival is gone
	}
	return p.ended.Add(wait)
}
