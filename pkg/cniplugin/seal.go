// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"slices"
	"sync"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// judged reports whether this program admitted this very entry before, and so
// may spare the judging.
func (n *node) judged() bool { return n.passed(n.Dir.VerificationCache(n.source())) }

// passed reports whether a seal is of this very entry and this program. Which
// entry that is, and whether it is admitted, is found out each time.
func (n *node) passed(seal store.VerificationCache) bool {
	return seal.Entry != "" && seal.Entry == n.entry()
}

// shortcut spares a verb the look at the rules where an ADD before it looked,
// found all right, and nothing has changed since: not the documents, the record
// or this program, and not a rule of anybody in nf_tables. What was true then is
// true now, for it depends on nothing else.
//
// It can only save time. Whatever it cannot tell means that the verb looks.
type shortcut struct {
	node    *node
	reading *store.Reading
	inputs  func() string // what a finding depends on, once; "" where nobody should vouch
	before  string        // the moment at which a look began; "" where none is to be sealed
}

// shortcut reads the documents.
func (n *node) shortcut() (*shortcut, error) {
	r, err := n.Dir.Read(n.source())
	return &shortcut{node: n, reading: r, inputs: sync.OnceValue(func() string {
		if n.plugin.Generation == nil || n.plugin.Program == "" || n.Dir.Boot() == "" {
			return ""
		}
		return r.Digest(n.plugin.Program, n.Dir.Path(), n.Dir.Boot())
	})}, err
}

// holds reports whether the rules are what the documents ask for, by a seal of
// this very moment. The kernel is asked only if all else is as it was: a node
// may have no nf_tables to ask.
func (s *shortcut) holds() bool {
	seal := s.reading.VerificationCache()
	if seal.Inputs == "" || seal.Inputs != s.inputs() {
		return false
	}
	s.before = s.moment()
	return s.before != "" && seal.Generation == s.before
}

// holdsFor reports whether they also are what the entry asks for: the one that
// the seal is of, and that the network's document was made of.
func (s *shortcut) holdsFor() bool { return s.node.passed(s.reading.VerificationCache()) && s.holds() }

// begin notes the moment before a look at the rules, if that tells of changes to
// all of them.
func (s *shortcut) begin(rec store.Record) {
	uncounted := func(o store.OwnedChain) bool {
		return !netfilter.Choice{Backend: o.Backend, Variant: o.Variant}.HasGeneration()
	}
	if s.before == "" && !slices.ContainsFunc(rec.Chains, uncounted) && s.inputs() != "" {
		s.before = s.moment()
	}
}

// end seals what a look found right. If somebody committed since it began, the
// seal is of a moment that never comes again, and does no harm. One that cannot
// be written is missed by nobody.
func (s *shortcut) end() {
	if s.before != "" && s.node.entry() != "" && !s.node.dryRun {
		_ = s.node.Dir.PutVerificationCache(s.node.source(), store.VerificationCache{Inputs: s.inputs(), Entry: s.node.entry(), Generation: s.before})
	}
}

// moment is "" where the kernel does not tell it. A look will say why.
func (s *shortcut) moment() string {
	m, err := s.node.plugin.Generation()
	if err != nil {
		return ""
	}
	return m.String()
}
