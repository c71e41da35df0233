// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestPace(t *testing.T) {
	now := time.Now()
	const interval = time.Minute
	failed := &Report{Result: Failed, Problems: []Problem{{Reason: ReasonRules}}}
	failing := func(times int) func(*pace) {
		return func(p *pace) {
			for range times {
				p.after(now, failed, 0, interval, time.Time{})
			}
		}
	}
	well := func(p *pace) { p.after(now, &Report{Result: Unchanged}, 0, interval, time.Time{}) }
	rivaled := func(p *pace) { p.after(now, &Report{Result: Repaired}, 4*time.Second, interval, time.Time{}) }
	withheld := func(p *pace) { p.after(now, &Report{Result: Failed}, 0, interval, now.Add(2*time.Second)) }
	for name, c := range map[string]struct {
		before func(*pace)
		cause  cause
		want   time.Duration
	}{
		"nothing happens":          {well, cause{}, interval},
		"rules changed":            {well, cause{rules: true}, apart},
		"files changed":            {well, cause{files: true}, apart},
		"somebody asks":            {well, cause{asked: true}, apart},
		"failed once":              {failing(1), cause{}, firstRetry},
		"failed, rules changed":    {failing(2), cause{rules: true}, apart}, // for a dry run
		"rolled back":              {withheld, cause{}, 2 * time.Second},
		"rolled back, rules":       {withheld, cause{rules: true}, apart},
		"failed, files changed":    {failing(3), cause{files: true}, apart},
		"failed three times":       {failing(3), cause{}, 4 * firstRetry},
		"failed for long":          {failing(20), cause{}, interval},
		"failed, then well":        {func(p *pace) { failing(3)(p); well(p) }, cause{}, interval},
		"a rival, rules changed":   {rivaled, cause{rules: true}, 4 * time.Second},
		"a rival, somebody asks":   {rivaled, cause{rules: true, asked: true}, apart},
		"a rival, nothing happens": {rivaled, cause{}, 12 * time.Second},
		"a rival, then nobody":     {func(p *pace) { rivaled(p); well(p) }, cause{rules: true}, apart},
	} {
		t.Run(name, func(t *testing.T) {
			var p pace
			c.before(&p)
			if got := p.due(c.cause).Sub(now); got != c.want {
				t.Errorf("due after %s, want %s", got, c.want)
			}
		})
	}
}

func TestFlapping(t *testing.T) {
	drift := policy.Diff{{Kind: policy.JumpChange, Family: policy.IPv4, Chain: "A", Text: "jump"}}
	other := policy.Diff{{Kind: policy.RuleChange, Family: policy.IPv4, Chain: "A", Text: "rule"}}
	now := time.Now()
	var v rival
	step := func(d policy.Diff, after time.Duration, by Writer) *Problem {
		now = now.Add(after)
		return v.judge(now, d, by)
	}
	// Once a minute is an agent, not a war; and different things are no tug of war.
	for range 3 * rivalry {
		if p := step(drift, rivalWindow/rivalry*2, Writer{}); p != nil {
			t.Fatal(p.Err)
		}
	}
	v = rival{}
	for range rivalry - 1 {
		if p := step(drift, 10*time.Millisecond, Writer{7, "firewalld"}); p != nil {
			t.Fatal(p.Err)
		}
		if p := step(other, 10*time.Millisecond, Writer{}); p != nil {
			t.Fatal(p.Err)
		}
	}
	p := step(drift, 10*time.Millisecond, Writer{})
	if p == nil {
		t.Fatal("nobody is suspected")
	}
	if want := `somebody undoes the rules again and again (ipv4 A: missing jump from POSTROUTING: of all traffic), most likely "firewalld" (host pid 7); ` +
		"repairs wait for 1s now: stop that program, or make it leave the chain alone"; p.Err.Error() != want {
		t.Errorf("%v\nwant %s", p.Err, want)
	}
	if v.pause() != firstPause {
		t.Errorf("pause %s", v.pause())
	}
	for range 10 {
		if step(drift, v.pause(), Writer{}) == nil {
			t.Fatal("it gave up")
		}
	}
	if v.pause() != longestPause {
		t.Errorf("pause %s, want %s", v.pause(), longestPause)
	}
	if step(nil, longestPause, Writer{}) == nil {
		t.Error("it is over too early")
	}
	if p := step(nil, longestPause+time.Second, Writer{}); p != nil || v.pause() != 0 {
		t.Errorf("it is not over: %v", p)
	}
}
