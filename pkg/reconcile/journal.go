// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"log/slog"
	"strings"
	"time"
)

// journal writes the log: what is news, once. A pass that finds all as it was
// says nothing.
type journal struct {
	log      *slog.Logger
	kept     string          // the chains, as they were last told of
	problems map[string]bool // those that hold
	warnings map[string]bool // those that were told
}

// mostWarnings bounds what is remembered; beyond it, things are told again.
const mostWarnings = 1000

// mostShown is how many changes of the rules a line of the log shows.
const mostShown = 5

func (j *journal) report(r *Report) {
	j.warn(r.Warnings)
	if len(r.Drift) > 0 {
		j.log.Warn("repaired rules that somebody had changed", "by", r.By.String(), "changes", strings.ReplaceAll(r.Drift.Summary(mostShown), "\n", "; "), "took", r.Took.Round(time.Microsecond))
	}
	for _, s := range r.Adopted {
		j.log.Info("took over what a source states", "source", s.String())
	}
	for _, s := range r.Dropped {
		if !r.Wrote {
			break
		}
		j.log.Info("dropped a network that nobody names or uses any more", "source", s.String())
	}
	j.chains(r)
	j.tell(r.Problems)
	j.log.Debug("pass", "result", r.Result, "took", r.Took)
}

// chains says what is kept where, when that is news.
func (j *journal) chains(r *Report) {
	if r.Rules == nil || r.Result == Failed {
		return
	}
	now := r.Summary()
	if now != j.kept && (j.kept != "" || r.Result == Changed) {
		j.log.Info("these chains are kept now", "chains", now)
	}
	j.kept = now
}

// tell says which problems are new and which are gone.
func (j *journal) tell(problems []Problem) {
	now := map[string]bool{}
	for _, p := range problems {
		text := p.Err.Error()
		if now[text] {
			continue
		}
		now[text] = true
		switch {
		case j.problems[text]:
		case p.Reason == ReasonStandby:
			j.log.Info(text)
		default:
			j.log.Error(text, "topic", p.Reason)
		}
	}
	if len(now) == 0 && len(j.problems) > 0 {
		j.log.Info("all is well again")
	}
	j.problems = now
}

func (j *journal) warn(warnings []error) {
	for _, w := range warnings {
		if w == nil || j.warnings[w.Error()] {
			continue
		}
		if j.warnings == nil || len(j.warnings) >= mostWarnings {
			j.warnings = map[string]bool{}
		}
		j.warnings[w.Error()] = true
		j.log.Warn(w.Error())
	}
}
