// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// maxChanges is how many changes of the rules a log line has.
const maxChanges = 5

// syncLog logs what is new in the reports of syncs. A sync that finds everything as before logs
// nothing.
type syncLog struct {
	log, once *slog.Logger
	problems  map[string]bool // of the report before, by their texts
	chains    string          // as they were logged last
	state     store.State     // of the report before
}

func (l *syncLog) warn(err error) {
	if err == nil {
		return
	}
	of, isFinding := errors.AsType[FindingWarning](err)
	if isFinding {
		l.once.Warn("warning", "finding", of.ID, "err", err)
		return
	}
	l.once.Warn("warning", "err", err)
}

func (l *syncLog) report(r *Report) {
	for _, w := range r.Warnings {
		l.warn(w)
	}
	if len(r.Drift) > 0 {
		l.repaired(r)
	}
	l.sources(r)
	if r.Rules != nil {
		l.state = r.State
	}
	// What an ADD or DEL wrote, such as the rule of a pod that is exempt by its namespace, is no line of the
	// reconciler.
	chains := r.Summary()
	if r.Result == Changed && chains != l.chains {
		l.log.Info("managing chains", "chains", chains)
		l.chains = chains
	}
	l.readiness(r)
	l.log.Debug("sync", "result", r.Result, "duration", r.Took)
}

// sources logs the policies that came into force and went.
func (l *syncLog) sources(r *Report) {
	for _, s := range r.Applied {
		changed := config.Differences(valuesOf(l.state.Find(s)), valuesOf(r.State.Find(s)))
		if len(changed) > 0 {
			l.log.Info("source updated", "source", s.String(), "changed", strings.Join(changed, ","))
		}
	}
	for _, s := range r.Dropped {
		l.log.Info("removed network", "source", s.String())
	}
}

// readiness logs the problems that the report before did not have, and that there are none any more.
func (l *syncLog) readiness(r *Report) {
	before := l.problems
	l.problems = map[string]bool{}
	for _, p := range r.Problems {
		text := p.Err.Error()
		isNew := !before[text] && !l.problems[text]
		l.problems[text] = true
		if isNew {
			l.problem(r, p)
		}
	}
	if len(before) > 0 && r.Ready() {
		l.log.Info("ready")
	}
}

func (l *syncLog) problem(r *Report, p Problem) {
	switch {
	case p.Reason == ReasonStandby:
		l.log.Info("standby", "reason", p.Reason, "err", p.Err)
	case p.Waiting:
		l.log.Info("waiting", "reason", p.Reason, "err", p.Err)
	case r.reverted() && p.aboutRules(): // a repetition is an error, with ReasonFlapping
		l.log.Warn("not ready", "reason", p.Reason, "err", p.Err)
	default:
		l.log.Error("not ready", "reason", p.Reason, "err", p.Err)
	}
}

func (l *syncLog) repaired(r *Report) {
	chains, missing, unexpected := r.Drift.Totals()
	changes := strings.ReplaceAll(r.Drift.Summary(maxChanges), "\n", "; ")
	l.log.Warn("repaired rules", "chain", strings.Join(chains, ","),
		"missing", missing, "unexpected", unexpected, "changed_by", r.By.String(), "changes", changes,
		"duration", r.Took.Round(time.Microsecond))
}

func (l *syncLog) reset(deleted map[policy.ChainFamily]uint64, took time.Duration, err error) {
	count, chains := uint64(0), map[string]bool{}
	for chain, n := range deleted {
		count += n
		chains[chain.Chain] = true
	}
	if len(chains) > 0 {
		names := strings.Join(slices.Sorted(maps.Keys(chains)), ",")
		took = took.Round(time.Microsecond)
		l.log.Info("reset connections", "count", count, "chain", names, "duration", took)
	}
	if err != nil {
		l.once.Warn("failed to reset connections", "err", err)
	}
}

// valuesOf returns the values in the policies of a source by key, as JSON, and its chain as it is; nil is an
// empty source.
func valuesOf(s *policy.Source) map[string]string {
	values := map[string]string{}
	if s == nil {
		return values
	}
	for _, p := range s.Policies() {
		var keys map[string]json.RawMessage
		if text, err := json.Marshal(p); err == nil {
			_ = json.Unmarshal(text, &keys) // of what Marshal returned
		}
		for key, value := range keys {
			values[key] += string(value) + " "
		}
	}
	values["masqChain"] = s.Policy.Chain // the same in all files
	return values
}
