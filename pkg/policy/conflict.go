// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
)

// ConflictError is a conflict between two sources of a chain, or two agent files.
type ConflictError struct {
	Chain                         string
	InForce, Superseded           Origin
	InForceValue, SupersededValue string // as they are written
	Scope                         bool   // the key is about the scope
}

// Error names both sources, the key and the remedy.
func (e *ConflictError) Error() string {
	remedy := "make them agree"
	networks := e.InForce.Source.Kind == Network && e.Superseded.Source.Kind == Network
	if e.Scope || networks && e.Superseded.Index < 0 {
		remedy += " or give one of them another masqChain, and each sourceCIDRs or outputInterfaces of its own"
	}
	return fmt.Sprintf("chain %s: %s is %s, which conflicts with %s, %s; the latter is in force: %s",
		e.Chain, e.Superseded, e.SupersededValue, e.InForce, e.InForceValue, remedy)
}

// ConflictErrors are several conflicts. There can be a million: one for each prefix
// that two sources name.
type ConflictErrors []*ConflictError

// Error returns one line for each of those that Summary returns.
func (e ConflictErrors) Error() string { return errors.Join(e.Summary()...).Error() }

// Unwrap returns all of them.
func (e ConflictErrors) Unwrap() []error {
	list := make([]error, len(e))
	for i, c := range e {
		list[i] = c
	}
	return list
}

// Summary returns the first conflicts and, if there are more, an error with their number.
func (e ConflictErrors) Summary() []error {
	const limit = 8
	list := e[:min(limit, len(e))].Unwrap()
	if more := len(e) - limit; more > 0 {
		list = append(list, fmt.Errorf("chain %s: and %d more conflicts", e[0].Chain, more))
	}
	return list
}

// conflict records a conflict of a key, or of a prefix that two lists name.
func (m *merger) conflict(inForce Origin, inForceValue any, superseded Origin, supersededValue any) {
	isScope := inForce.Key == "sourceCIDRs" || inForce.Key == "outputInterfaces"
	empty := "empty"
	if isScope {
		empty = "any"
	}
	m.policy.Conflicts = append(m.policy.Conflicts, &ConflictError{
		Chain:           m.policy.Chain,
		InForce:         inForce,
		InForceValue:    valueText(inForceValue, empty),
		Superseded:      superseded,
		SupersededValue: valueText(supersededValue, empty),
		Scope:           isScope,
	})
}

// valueText writes a value for people, and the word in empty for one that is empty.
func valueText(v any, empty string) string {
	return cmp.Or(quoteUnlessWord(strings.Trim(fmt.Sprint(v), "[]")), empty)
}

// bySuperseded returns the conflicts that each source loses.
func (e ConflictErrors) bySuperseded() map[SourceID]ConflictErrors {
	lost := map[SourceID]ConflictErrors{}
	for _, c := range e {
		lost[c.Superseded.Source] = append(lost[c.Superseded.Source], c)
	}
	return lost
}
