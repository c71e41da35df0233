// SPDX-License-Identifier: Apache-2.0

package conflist

import "time"

const (
	// brief is how long an entry lives at most that somebody is waiting to
	// remove.
	brief = 5 * time.Second
	// manyBrief is how many such entries in a row make a war: a person who tries
	// things, or a main CNI plugin that is installed, removes fewer.
	manyBrief = 10
	// So many are put back with a delay that grows by one step each, to less than
	// half a second. A main CNI plugin that rewrites its file some dozen times
	// is no reason to leave pods without us for longer.
	mostBrief = 60
	step      = 7 * time.Millisecond
	// Then the delay doubles from firstPause to longestPause for as long as it
	// goes on. Each repair makes the runtime load its configuration twice.
	firstPause   = time.Second
	longestPause = time.Minute

	// memory is for how long a removal is remembered. slowRemovals of entries
	// that lived longer, of which the first and the last are slowApart from one
	// another, are a war too; but one in which to wait would gain nothing.
	memory       = 10 * time.Minute
	slowRemovals = 5
	slowApart    = time.Minute

	// A war is over when the entry has lived for shortestPeace; one whose removals
	// come slowly when it has lived twice as long as any of those that were
	// removed in it, but no longer than longestPeace.
	shortestPeace = 10 * time.Second
	longestPeace  = 5 * time.Minute
)

// removal is one of our entry by somebody else.
type removal struct {
	at    time.Time
	lived time.Duration // the entry, as far as we saw it
}

// war judges how often somebody removes our entry, and how long the next repair
// has to wait. Its times are of when things were noticed.
type war struct {
	since    time.Time // when the entry came; zero until it was there once
	gone     time.Time // when it went; zero while it is there
	removals []removal // within memory
	briefly  int       // how many removals in a row were of an entry that lived briefly
	on       bool
}

// there takes note that the entry is there, and reports whether a war is over by
// that.
func (w *war) there(now time.Time) (over bool) {
	if w.since.IsZero() || !w.gone.IsZero() {
		w.since, w.gone = now, time.Time{}
	}
	if !w.on || now.Before(w.peaceAt()) {
		return false
	}
	*w = war{since: w.since}
	return true
}

// missing takes note that the entry is not there.
func (w *war) missing(now time.Time) {
	if !w.gone.IsZero() {
		return
	}
	w.gone = now
	if w.since.IsZero() {
		return // it was never there
	}
	lived := now.Sub(w.since)
	for len(w.removals) > 0 && (now.Sub(w.removals[0].at) > memory || len(w.removals) > 2*mostBrief) {
		w.removals = w.removals[1:]
	}
	w.removals = append(w.removals, removal{now, lived})
	if lived < brief {
		w.briefly++
	} else {
		w.briefly = 0
	}
	slow := len(w.removals) >= slowRemovals && now.Sub(w.removals[0].at) >= slowApart
	w.on = w.on || w.briefly >= manyBrief || slow
}

// delay is how long the entry stays away once it is missing.
func (w *war) delay() time.Duration {
	switch n := w.briefly; {
	case n < manyBrief:
		return 0
	case n <= mostBrief:
		return time.Duration(n-manyBrief+1) * step
	default:
		return min(firstPause<<min(n-mostBrief-1, 16), longestPause)
	}
}

// due is when the file may be written next.
func (w *war) due() time.Time {
	if w.gone.IsZero() {
		return w.since.Add(w.delay())
	}
	return w.gone.Add(w.delay())
}

// peaceAt is when the war is over if the entry stays.
func (w *war) peaceAt() time.Time {
	peace := shortestPeace
	if w.briefly < manyBrief && len(w.removals) > 0 {
		// The first entry may have lived in peace for long.
		for _, r := range w.removals[1:] {
			peace = max(peace, min(2*r.lived, longestPeace))
		}
	}
	return w.since.Add(peace)
}

// span is how many removals are remembered, and since when.
func (w *war) span(now time.Time) (int, time.Duration) {
	if len(w.removals) == 0 {
		return 0, 0
	}
	return len(w.removals), now.Sub(w.removals[0].at)
}
