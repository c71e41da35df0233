// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// rivalry is how often the same drift is repaired within rivalWindow
	// before somebody is taken to undo what we do: a person who tries, or a
	// tool that runs each minute, does it less often.
	rivalry     = 30
	rivalWindow = time.Minute
	// The pause between repairs doubles from firstPause to longestPause for
	// as long as the rival goes on.
	firstPause   = time.Second
	longestPause = time.Minute
)

// rival recognises that somebody undoes us again and again. To go on at the pace
// of events would keep both busy for nothing.
type rival struct {
	repairs map[string][]time.Time // of the same drift, within the window
	wait    time.Duration          // 0 while nobody is suspected
	last    time.Time              // of the repairs
	what    string
	who     Writer
}

// judge takes note of a pass, and returns the problem that a rival is.
func (v *rival) judge(now time.Time, drift policy.Diff, by Writer) *Problem {
	if len(drift) > 0 {
		v.repaired(now, drift[0].String(), by)
	}
	// It is over when nothing happened for twice as long as would be waited.
	if v.wait > 0 && now.Sub(v.last) > 2*v.wait {
		*v = rival{}
	}
	if v.wait == 0 {
		return nil
	}
	return &Problem{Reason: ReasonFlapping, Err: fmt.Errorf("somebody undoes the rules again and again (%s), most likely %s; "+
		"repairs wait for %s now: stop that program, or make it leave the chain alone", v.what, v.who, v.wait)}
}

func (v *rival) repaired(now time.Time, what string, by Writer) {
	if v.repairs == nil {
		v.repairs = map[string][]time.Time{}
	}
	recent := v.repairs[what]
	for len(recent) > 0 && now.Sub(recent[0]) > rivalWindow {
		recent = recent[1:]
	}
	const mostKinds = 100 // what differs each time is no tug of war over one thing
	if len(v.repairs) >= mostKinds {
		clear(v.repairs)
	}
	v.repairs[what] = append(recent, now)
	v.last = now
	if by != (Writer{}) {
		v.who = by
	}
	switch {
	case v.wait > 0:
		v.wait = min(2*v.wait, longestPause)
	case len(v.repairs[what]) >= rivalry:
		v.wait, v.what = firstPause, what
	}
}

// pause returns how long the next repair has to wait.
func (v *rival) pause() time.Duration { return v.wait }
