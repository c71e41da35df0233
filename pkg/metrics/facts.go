// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"errors"
	"io/fs"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// facts are what the last pass that could read the node found. What is in there
// is replaced and never changed, so that it may be read without a lock.
type facts struct {
	sources   []source
	conflicts map[string]int // by chain
	prefixes  map[series]int
	backends  []backend
	conflist  *bool // whether the runtimes' network has an entry of ours; nil: nobody knows
}

// source is a source that is stored, or that has a problem, or both.
type source struct {
	policy.SourceID
	name      string
	valid     bool
	statement *policy.SourcePolicy // nil where none is stored, and of others together
}

type backend struct{ name, variant string }

// note takes over what a pass found. What one that could not read the documents
// or the rules leaves open, stays as it was.
func (f *facts) note(r *reconcile.Report) {
	if r.Sources != nil {
		f.conflist = conflist(r.Sources)
	}
	if r.Rules == nil {
		return
	}
	f.sources = sourcesOf(r)
	f.conflicts = conflictsOf(r)
	f.prefixes = prefixesOf(r.Rules)
	f.backends = backendsOf(r.Rules)
}

// sourcesOf returns the sources, sorted; those beyond maxNames as one.
func sourcesOf(r *reconcile.Report) []source {
	found := map[policy.SourceID]*source{}
	for i := range r.State.Sources {
		c := &r.State.Sources[i]
		found[c.ID] = &source{SourceID: c.ID, valid: true, statement: &c.Policy}
	}
	for _, p := range r.Problems {
		if p.Source == (policy.SourceID{}) {
			continue
		}
		if found[p.Source] == nil {
			found[p.Source] = &source{SourceID: p.Source, valid: true}
		}
		found[p.Source].valid = found[p.Source].valid && p.Reason != reconcile.ReasonSource
	}
	var all []*source
	for _, s := range found {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *source) int { return a.Compare(b.SourceID) })
	var out []source
	var taken names
	place := map[string]int{}
	for _, s := range all {
		s.name = taken.admit(sourceLabel(s.SourceID))
		if i, shared := place[s.name]; shared {
			out[i].valid = out[i].valid && s.valid
			out[i].statement = nil
			continue
		}
		if s.name == other {
			s.SourceID, s.statement = policy.SourceID{}, nil
		}
		place[s.name] = len(out)
		out = append(out, *s)
	}
	return out
}

// conflictsOf counts the contradictions of each chain: those that are in force,
// where one side yields, and those for which a source was refused.
func conflictsOf(r *reconcile.Report) map[string]int {
	count := map[string]int{}
	seen := map[policy.ConflictError]bool{}
	var taken names
	add := func(e *policy.ConflictError) {
		if !seen[*e] {
			seen[*e] = true
			count[taken.admit(label(e.Chain))]++
		}
	}
	for _, p := range r.Rules.Policies {
		count[taken.admit(label(p.Chain))] += 0
		for _, e := range p.Conflicts {
			add(e)
		}
	}
	for _, p := range r.Problems {
		eachConflict(p.Err, add)
	}
	return count
}

// eachConflict calls add for all conflicts that an error is made of.
func eachConflict(err error, add func(*policy.ConflictError)) {
	var several interface{ Unwrap() []error }
	var conflict *policy.ConflictError
	switch {
	case errors.As(err, &several):
		for _, e := range several.Unwrap() {
			eachConflict(e, add)
		}
	case errors.As(err, &conflict):
		add(conflict)
	}
}

// prefixesOf counts the destinations of each chain in the families that it
// manages.
func prefixesOf(v *enforce.State) map[series]int {
	count := map[series]int{}
	var taken names
	for _, p := range v.Policies {
		name := taken.admit(label(p.Chain))
		for _, f := range p.Families() {
			for _, a := range actions() {
				count[series{name, f, a}] += 0
			}
		}
		for _, e := range p.Destinations {
			f := policy.FamilyOf(e.Prefix.Addr())
			if slices.Contains(p.Families(), f) {
				count[series{name, f, e.Action}]++
			}
		}
	}
	return count
}

// backendsOf returns the forms in which chains are kept, each once.
func backendsOf(v *enforce.State) []backend {
	var out []backend
	for _, g := range v.Groups {
		b := backend{label(string(g.Choice.Backend)), label(g.Choice.Variant)}
		if !slices.Contains(out, b) {
			out = append(out, b)
		}
	}
	return out
}

// conflist tells whether the network that runtimes pick, the first by the name
// of its file, has a plugin entry. Multus, which delegates to another network, is
// passed over.
func conflist(s *reconcile.Sources) *bool {
	if s.ConfDirErr != nil && !errors.Is(s.ConfDirErr, fs.ErrNotExist) {
		return nil
	}
	lists := slices.DeleteFunc(slices.Clone(s.ConfDir.Conflists), func(l config.Conflist) bool { return l.IsMultus() && len(l.Entries) == 0 })
	present := len(lists) > 0 && len(lists[0].Entries) > 0
	return &present
}
