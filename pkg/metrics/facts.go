// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// facts are what the last sync that could read the node found. They are replaced and never changed.
type facts struct {
	sources   []source
	conflicts map[string]int // by chain
	prefixes  map[series]int
	backends  []backend
	conflist  *bool // whether the runtime's network has the plugin entry; nil if unknown
}

// source is a source that is stored or has a problem.
type source struct {
	id       policy.SourceID // zero for all sources beyond maxNames
	name     string
	valid    bool
	policies []policy.SourcePolicy // nil if none is stored
}

type backend struct{ name, variant string }

// update takes what a sync found. What the sync could not read stays as it was.
func (f *facts) update(r *reconcile.Report) {
	if r.Sources != nil {
		f.conflist = entryPresent(r.Sources)
	}
	if r.Rules == nil {
		return
	}
	f.sources, f.conflicts, f.prefixes, f.backends = sourcesOf(r), conflictsOf(r), prefixesOf(r.Rules), nil
	for _, g := range r.Rules.Groups {
		b := backend{label(string(g.Choice.Backend)), label(g.Choice.Variant)}
		if !slices.Contains(f.backends, b) {
			f.backends = append(f.backends, b)
		}
	}
}

// sourcesOf returns the sources, sorted; those beyond maxNames as one.
func sourcesOf(r *reconcile.Report) []source {
	found := map[policy.SourceID]source{}
	for i := range r.State.Sources {
		s := &r.State.Sources[i]
		found[s.ID] = source{id: s.ID, valid: true, policies: s.Policies()}
	}
	for _, p := range r.Problems {
		if p.Source == (policy.SourceID{}) {
			continue
		}
		s, known := found[p.Source]
		found[p.Source] = source{id: p.Source, valid: (s.valid || !known) && p.Reason != reconcile.ReasonSource, policies: s.policies}
	}
	var out []source
	var taken names
	at := map[string]int{}
	for _, id := range slices.SortedFunc(maps.Keys(found), policy.SourceID.Compare) {
		s := found[id]
		s.name = taken.admit(sourceLabel(id))
		i, shared := at[s.name]
		if !shared {
			i = len(out)
			at[s.name] = i
			out = append(out, s)
		}
		if shared || s.name == other {
			out[i] = source{name: s.name, valid: out[i].valid && s.valid}
		}
	}
	return out
}

// conflictsOf counts the conflicts of each chain: those in force, where one source is superseded, and
// those for which a source was refused.
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

// eachConflict calls add for all conflicts in an error.
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

// prefixesOf counts the destinations of each chain in the families that it manages.
func prefixesOf(s *enforce.State) map[series]int {
	count := map[series]int{}
	var taken names
	for _, p := range s.Policies {
		name := taken.admit(label(p.Chain))
		for _, f := range p.Families() {
			count[series{name, f, policy.Exempt}] += 0
			count[series{name, f, policy.Masqueraded}] += 0
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

// entryPresent reports whether the network that the runtime uses, the first by file name, has the
// plugin entry. A configuration of Multus, which delegates to another network, does not count.
func entryPresent(s *reconcile.Sources) *bool {
	if s.ConfDirErr != nil && !errors.Is(s.ConfDirErr, fs.ErrNotExist) {
		return nil
	}
	first := slices.IndexFunc(s.ConfDir.Conflists, func(l config.Conflist) bool { return !l.IsMultus() || len(l.Entries) > 0 })
	present := first >= 0 && len(s.ConfDir.Conflists[first].Entries) > 0
	return &present
}

const (
	maxLabel = 63  // bytes in the value of a label
	maxNames = 200 // sources, and chains, with series of their own; the others share one
	other    = "other"
)

// label makes the value of a label: printable ASCII, quoted if it was anything else. A value that is
// too long ends in a part of its hash, so that values with the same beginning differ.
func label(s string) string {
	v := s
	if strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }) {
		v = strconv.QuoteToASCII(v)
	}
	if len(v) <= maxLabel {
		return v
	}
	sum := sha256.Sum256([]byte(s))
	end := "~" + hex.EncodeToString(sum[:4])
	return v[:maxLabel-len(end)] + end
}

// sourceLabel names a source: network/podnet, agent-files.
func sourceLabel(s policy.SourceID) string {
	if s.Kind == policy.Network {
		return string(policy.Network) + "/" + label(s.Name)
	}
	return string(s.Kind)
}

// names are the label values that have series of their own: the first maxNames.
type names map[string]bool

// admit returns the name, or other if there are too many.
func (n *names) admit(name string) string {
	switch {
	case (*n)[name]:
	case len(*n) >= maxNames:
		return other
	case *n == nil:
		*n = names{name: true}
	default:
		(*n)[name] = true
	}
	return name
}
