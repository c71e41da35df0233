// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// shortcut spares a verb the look at the rules where an ADD before it looked,
// found all right, and nothing has changed since: not the documents, the record
// or this program, and not a rule of anybody in nf_tables. What was true then is
// true now, for it depends on nothing else.
//
// It can only save time. Whatever it cannot tell means that the verb looks.
type shortcut struct {
	node    *node
	reading *store.Reading
	err     error  // why there is no reading
	inputs  string // "" where nobody should vouch for anything
	before  string // the moment at which the look began; "" if it is not known
}

// shortcut reads the documents, and takes down what a finding depends on.
func (n *node) shortcut() *shortcut {
	s := &shortcut{node: n}
	if s.reading, s.err = n.Dir.Read(n.source()); s.err == nil && n.plugin.Moment != nil && n.plugin.Program != "" && n.Dir.Boot() != "" {
		s.inputs = s.reading.Digest(n.plugin.Program, n.Dir.Path(), n.Dir.Boot())
	}
	return s
}

// sealed reports whether a seal was made with what was read.
func (s *shortcut) sealed() bool { return s.inputs != "" && s.reading.Seal().Inputs == s.inputs }

// knows reports whether the seal is of this very entry: then it passed all that
// this one would have to pass, and its network's document says what it says.
func (s *shortcut) knows() bool {
	return s.sealed() && s.reading.Seal().Entry == s.node.entry() && s.node.admitted() == nil
}

// holds reports whether the rules are what the documents ask for, by a seal of
// this very moment. The kernel is asked only if all else is as it was: a node
// may have no nf_tables to ask.
func (s *shortcut) holds() bool {
	if !s.sealed() {
		return false
	}
	s.before = s.moment()
	return s.before != "" && s.reading.Seal().Moment == s.before
}

// begin notes the moment before a look at the rules.
func (s *shortcut) begin(rec store.Record) {
	uncounted := func(o store.OwnedChain) bool {
		return !netfilter.Choice{Backend: o.Backend, Variant: o.Variant}.Counted()
	}
	switch {
	case s.inputs == "" || slices.ContainsFunc(rec.Chains, uncounted):
		s.inputs = ""
	case s.before == "":
		s.before = s.moment()
	}
}

// end seals what a look found right. If somebody committed since it began, the
// seal is of a moment that never comes again, and does no harm. One that cannot
// be written is missed by nobody.
func (s *shortcut) end() {
	if s.inputs != "" && s.before != "" {
		_ = s.node.Dir.PutSeal(s.node.source(), store.Seal{Inputs: s.inputs, Entry: s.node.entry(), Moment: s.before})
	}
}

// moment is "" where the kernel does not tell it. A look will say why.
func (s *shortcut) moment() string {
	m, err := s.node.plugin.Moment()
	if err != nil {
		return ""
	}
	return m.String()
}
