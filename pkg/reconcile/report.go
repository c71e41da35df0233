// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Result is the outcome of a sync, as the metric reconciles_total has it.
type Result string

// The results of syncs.
const (
	Unchanged Result = "unchanged" // everything was correct, nothing was written
	Repaired  Result = "repaired"  // rules differed from what had been written before
	Changed   Result = "changed"   // documents changed, or rules that had not been written before
	Failed    Result = "failed"    // something that had to be done could not be done
)

// Results returns all of them.
func Results() []Result { return []Result{Unchanged, Repaired, Changed, Failed} }

// Report is the result of a sync or of a dry run.
type Report struct {
	Started time.Time
	Took    time.Duration
	Result  Result
	Waiting bool // the loop made no sync: another one is active, or it must not use the dataDir

	Problems []Problem // in the order in which they were found
	Warnings []error   // worth an operator's attention; they stop nothing

	Sources *Sources
	State   store.State
	inputs  string // digest of what State was decoded from; see enforce.Enforcer.Inputs
	// generation is one from before Rules were read, zero if it is unknown.
	generation netfilter.Generation
	InForce    []policy.Source // what Rules is computed from: the documents, in a dry run after the sync
	Rules      *enforce.State  // after the sync; nil if the documents cannot be read
	Before     *enforce.State  // before the sync wrote, with its counters; nil if it wrote nothing

	Drift   policy.Diff       // what other programs changed in rules that had been written before
	By      Writer            // the last program that changed rules before the sync, if known
	Pending []policy.SourceID // sources whose policy changed and is not applied
	Applied []policy.SourceID // sources whose changed policy the sync applied
	// Dropped are networks that are, or would be, removed: they are unused, or plugin.toml excludes them.
	Dropped []policy.SourceID

	Lost         []Problem // files that no source restores: the desired rules are unknown
	OtherDataDir error     // why nothing may be written: the dataDir is not the node's

	Unrecorded []UnrecordedPod // pods of the runtime's cache that a sync could not record

	Conflist *conflist.Status // nil unless a loop syncs the conflist; Inserted is since the report before
}

// Ready reports whether there is no problem.
func (r *Report) Ready() bool { return len(r.Problems) == 0 }

// WarningsOf returns the warnings that the finding ID of doctor has; for "", those that none has.
func (r *Report) WarningsOf(id string) (found []error) {
	for _, w := range r.Warnings {
		if of, _ := errors.AsType[FindingWarning](w); of.ID == id {
			found = append(found, w)
		}
	}
	return found
}

// Summary names the managed chains with their backends in one line.
func (r *Report) Summary() string {
	var chains []string
	if r.Rules == nil {
		return ""
	}
	for _, chain := range r.Rules.Chains {
		for _, c := range chain.Desired.Chains {
			text := fmt.Sprintf("%s (%s, %s, %d rules)", c.Name, c.Family, chain.Choice, len(c.Rules))
			chains = append(chains, text)
		}
	}
	return strings.Join(chains, ", ")
}

// Changed returns the keys in which the policy that a source states now differs from the stored one, in a dry
// run.
func (r *Report) Changed(id policy.SourceID) []string {
	for i := range r.InForce {
		if r.InForce[i].ID == id {
			return config.Differences(valuesOf(r.State.Find(id)), valuesOf(&r.InForce[i]))
		}
	}
	return nil
}

// Differs reports whether rules in the kernel are not what the sources ask for.
func (r *Report) Differs() bool { return r.Rules != nil && r.OtherDataDir == nil && r.Rules.Differs() }

// Incomplete returns why the desired rules are unknown, or nil: documents cannot be read, and no source
// restores them.
func (r *Report) Incomplete() error {
	var errs []error
	for _, p := range r.Lost {
		errs = append(errs, p.Err)
	}
	return errors.Join(errs...)
}

// Obstacles returns the problems without the differences that a sync would repair.
func (r *Report) Obstacles() []Problem {
	return slices.DeleteFunc(slices.Clone(r.Problems), func(p Problem) bool { return isDrift(p.Err) })
}

// Unfinished reports whether a sync has something to write.
func (r *Report) Unfinished() bool {
	if r.OtherDataDir != nil {
		return false
	}
	return len(r.Pending)+len(r.Dropped) > 0 || r.Rules != nil && !r.Rules.InSync()
}

// verified reports whether the sync found all rules as the documents ask for, and wrote nothing.
func (r *Report) verified() bool {
	if r.Result != Unchanged || r.Rules == nil || r.Incomplete() != nil {
		return false
	}
	isRight := r.Rules.InSync() && len(r.Rules.OtherDataDirs) == 0 && !r.rulesFailed()
	return isRight && !r.Unfinished()
}

// sameOutstanding reports whether a dry run would write only what the last sync failed to write.
func (r *Report) sameOutstanding(last *Report) bool {
	if r.Ready() && !r.Unfinished() {
		return false
	}
	if last.Rules == nil { // it did not come to observe them, and its repetition will
		return true
	}
	if r.Rules == nil {
		return false
	}
	s, was := r.Rules, last.Rules
	sameRules := slices.Equal(s.Diff(), was.Diff()) && slices.Equal(s.Stale, was.Stale) &&
		slices.Equal(s.Duplicates, was.Duplicates) && slices.Equal(s.OtherDataDirs, was.OtherDataDirs)
	sameSources := slices.Equal(r.Pending, last.Pending) && slices.Equal(r.Dropped, last.Dropped)
	return sameRules && sameSources && slices.EqualFunc(r.State.Unreadable, last.State.Unreadable, isSameFile)
}

func isSameFile(f, g store.FileError) bool { return f.File == g.File && f.IsNewer() == g.IsNewer() }

// rulesFailed reports whether rules are not known to be what the documents in force ask for.
func (r *Report) rulesFailed() bool {
	return r.OtherDataDir != nil || slices.ContainsFunc(r.Problems, Problem.aboutRules)
}

// failed reports whether something is to be tried again: rules, or a policy that could not be applied.
func (r *Report) failed() bool {
	return r.OtherDataDir != nil || slices.ContainsFunc(r.Problems, Problem.failure)
}

// reverted reports whether the sync failed only because another program changed the rules again
// before they were verified.
func (r *Report) reverted() bool {
	for _, p := range r.Problems {
		isRevert := isDrift(p.Err) && len(r.Drift) > 0 || errors.Is(p.Err, netfilter.ErrChanged)
		if p.failure() && !isRevert {
			return false
		}
	}
	return r.failed()
}

// has reports whether the cause of a problem is an error.
func (r *Report) has(err error) bool {
	for _, p := range r.Problems {
		if errors.Is(p.Err, err) {
			return true
		}
	}
	return false
}

// add adds a problem, and returns its reason. The reason of the cause takes the place of the given one
// where the source itself is valid (a disk, a conflict) or something is missing that rules need.
func (r *Report) add(p Problem) Reason {
	_, isConflict := errors.AsType[*policy.ConflictError](p.Err)
	_, isUnwritable := errors.AsType[*enforce.UnwritableError](p.Err)
	hasSource := p.Source != policy.SourceID{}
	// A program, a part of the kernel or a capability is missing.
	lacksPart := errors.Is(p.Err, netfilter.ErrUnusable) || errors.Is(p.Err, fs.ErrPermission)
	switch {
	case (hasSource || p.Reason == ReasonSource) && (isUnwritable || isDiskFault(p.Err)):
		p.Reason = ReasonState
	case hasSource && isConflict:
		p.Reason = ReasonConflict
	case p.Reason == ReasonRules && lacksPart:
		p.Reason = ReasonBackend
	}
	r.Problems = append(r.Problems, p)
	return p.Reason
}

func (r *Report) problem(reason Reason, err error) { r.add(Problem{Reason: reason, Err: err}) }

func (r *Report) sourceProblem(s policy.SourceID, err error) {
	r.add(Problem{Reason: ReasonSource, Source: s, Err: err})
}

func (r *Report) chainProblem(reason Reason, chain, format string, args ...any) {
	r.add(Problem{Reason: reason, Chain: chain, Err: fmt.Errorf(format, args...)})
}

// warn adds a warning, once.
func (r *Report) warn(err error) {
	if err == nil {
		return
	}
	for _, w := range r.Warnings {
		if w.Error() == err.Error() {
			return
		}
	}
	r.Warnings = append(r.Warnings, err)
}

// planned takes over what a plan says, in place of what one before it said.
func (r *Report) planned(p plan) {
	r.Problems, r.Pending, r.Dropped, r.Lost = p.says.Problems, nil, p.says.Dropped, p.says.Lost
	for _, c := range p.Changed {
		r.Pending = append(r.Pending, c.ID)
	}
	for _, w := range p.says.Warnings {
		r.warn(w)
	}
}
