// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Result is what came of a pass, as metrics name it.
type Result string

// The results of passes.
const (
	Unchanged Result = "unchanged" // all was right, and nothing was written
	Repaired  Result = "repaired"  // rules differed from what had been made
	Changed   Result = "changed"   // documents, or rules that had not been made yet
	Failed    Result = "failed"    // something that had to be done could not be
)

// Results returns all of them.
func Results() []Result { return []Result{Unchanged, Repaired, Changed, Failed} }

// Topic is what a problem is about, as metrics and logs name it.
type Reason string

// The topics of problems.
const (
	ReasonSource   Reason = "source"   // a document that cannot be used
	ReasonConflict Reason = "conflict" // sources that contradict each other
	ReasonRules    Reason = "rules"    // rules that cannot be vouched for
	ReasonState    Reason = "state"    // the dataDir
	ReasonFlapping Reason = "rival"    // somebody undoes what we do
	ReasonStandby  Reason = "standby"  // another reconciler is at work
	ReasonSettings Reason = "settings" // the reconciler's own file
	ReasonConflist Reason = "conflist" // a plugin entry with which every ADD fails
	ReasonPlugin   Reason = "plugin"   // the plugin's binary
)

// Problem is a reason why the node is not ready: the last good policy is in
// force, but not what the sources ask for, or nobody can vouch for it.
type Problem struct {
	Reason Reason
	Source policy.SourceID // that is not in force; else the zero Source
	Chain  string          // of TopicConflict and TopicRules; else ""
	Err    error
}

// Report is what a pass found and did.
type Report struct {
	Started time.Time
	Took    time.Duration
	Result  Result

	// Problems are why the node is not ready, in the order of their finding.
	Problems []Problem
	// Warnings are what an operator should know of and stops nothing.
	Warnings []error

	Sources *Sources
	State   store.State
	// Contributions are what the View is of: the documents, with what the
	// sources state now.
	Stored []policy.Source
	// State is the rules as they stand after the pass. It is nil where the
	// documents could not be read.
	Rules *enforce.State
	// Before is the rules as they stood before the pass wrote, with what the
	// kernel had counted by then. It is nil where the pass wrote nothing.
	Before *enforce.State

	// Drift is what others had changed in the rules that were made before.
	Drift policy.Diff
	// By is who changed rules last before the pass, where the kernel told.
	By Writer
	// Pending are those who state something else than is in force.
	Pending []policy.SourceID
	// Adopted are those whose statement the pass put in force.
	Adopted []policy.SourceID
	// Rejected is why policies that the pass tried to put in force are not, by source.
	Rejected map[policy.SourceID]error
	// Dropped are the networks that nobody uses or names any more.
	Dropped []policy.SourceID
	// Lost is why rules cannot be judged: documents are damaged, and nobody
	// knows what they held.
	Lost []error
	// Refused is why nothing may be written: the dataDir is not the node's.
	Refused error
	// Wrote tells that the pass had something to write, and the lock for it.
	Wrote bool
}

// Ready reports whether the rules are what the sources ask for.
func (r *Report) Ready() bool { return len(r.Problems) == 0 }

// StandsBy reports whether no pass was made, because another reconciler makes
// them.
func (r *Report) Standby() bool {
	return slices.ContainsFunc(r.Problems, func(p Problem) bool { return p.Reason == ReasonStandby })
}

// Summary names the chains that are kept, and where, in one line.
func (r *Report) Summary() string {
	var chains []string
	if r.Rules != nil {
		for _, g := range r.Rules.Groups {
			for _, c := range g.Desired.Chains {
				chains = append(chains, fmt.Sprintf("%s (%s, %s, %d rules)", c.Name, c.Family, g.Choice, len(c.Rules)))
			}
		}
	}
	return strings.Join(chains, ", ")
}

// Err returns all problems as one error, or nil.
func (r *Report) Err() error {
	var errs []error
	for _, p := range r.Problems {
		errs = append(errs, p.Err)
	}
	return errors.Join(errs...)
}

// Unfinished reports whether a pass that may write has something to write.
func (r *Report) Unfinished() bool {
	if r.Incomplete() != nil || r.Refused != nil {
		return false // what is there stays as it is
	}
	return len(r.Pending)+len(r.Dropped)+len(r.State.Damaged) > 0 || r.Rules != nil && !r.Rules.InSync()
}

// leaves reports whether what this dry run would write is what the last pass could
// not.
func (r *Report) leaves(last *Report) bool {
	return last.Rules == nil || (!r.Ready() || r.Unfinished()) && r.outstanding() == last.outstanding()
}

// outstanding describes what a pass would write, whether or not it failed before.
func (r *Report) outstanding() string {
	if r.Rules == nil {
		return ""
	}
	v := r.Rules
	return fmt.Sprintln(v.Diff(), v.Stale, v.Duplicates, v.OtherDataDirs, r.Pending, r.Dropped, r.State.Damaged)
}

// rulesFailed reports whether rules are not what the documents in force ask for.
func (r *Report) rulesFailed() bool {
	return r.Refused != nil || slices.ContainsFunc(r.Problems, Problem.aboutRules)
}

// aboutRules reports whether the problem is about rules that documents in force ask
// for, rather than about a policy that is not in force.
func (p Problem) aboutRules() bool {
	return p.Source == (policy.SourceID{}) && (p.Reason == ReasonRules || p.Reason == ReasonState)
}

func (r *Report) problem(topic Reason, err error) {
	r.Problems = append(r.Problems, Problem{Reason: topic, Err: err})
}

// sourceProblem reports why a source is not in force. The topic is that of the cause,
// where the source itself is sound.
func (r *Report) sourceProblem(topic Reason, s policy.SourceID, err error) {
	var conflict *policy.ConflictError
	var unwritable *enforce.UnwritableError
	switch {
	case errors.As(err, &unwritable):
		topic = ReasonState
	case errors.As(err, &conflict):
		topic = ReasonConflict
	}
	r.Problems = append(r.Problems, Problem{Reason: topic, Source: s, Err: err})
}

func (r *Report) chainProblem(topic Reason, chain string, err error) {
	r.Problems = append(r.Problems, Problem{Reason: topic, Chain: chain, Err: err})
}

func (r *Report) warn(err error) {
	if err != nil && !slices.ContainsFunc(r.Warnings, func(w error) bool { return w.Error() == err.Error() }) {
		r.Warnings = append(r.Warnings, err)
	}
}

// undone reports whether the pass failed for nothing but that the rules which it
// had just written were others again when it looked: somebody is as fast.
func (r *Report) undone() bool {
	found := false
	for _, p := range r.Problems {
		var drift *enforce.DriftError
		switch {
		case !p.aboutRules():
		case !errors.As(p.Err, &drift):
			return false
		default:
			found = true
		}
	}
	return found && len(r.Drift) > 0
}
