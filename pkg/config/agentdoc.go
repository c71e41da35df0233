// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/document"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// document returns the policy as a document beside the agents' files.
func (a AgentPolicy) document() *agentDoc {
	w := a.Written
	return &agentDoc{Document: Document{File: OwnPolicy, Settings: w.File, Lines: w.Lines, Indexes: w.Indexes}, AgentPolicy: a}
}

// agentDoc is one document of the agent files, or what takes part beside them.
type agentDoc struct {
	Document
	AgentPolicy
	resync   time.Duration // 0 where it states none
	unread   bool          // nobody knows what it states
	warnings []error
}

// parseAgentDoc reads a file. What is wrong with it is in its form, and is not
// all until it is judged.
func parseAgentDoc(path string, doc []byte, d Dialect, decode document.Decoder) *agentDoc {
	a := &agentDoc{Document: Document{File: path}}
	members, more, err := agentMembers(path, doc, decode)
	if err != nil {
		a.unread, a.Mistakes = true, []error{err}
		return a
	}
	if more {
		a.warn(0, errors.New("another document follows the first, which alone is read; join them, or write one file for each"))
	}
	keys := a.keys()
	a.Read(a.asKnown(members, keys), keys)
	if s := &a.Policy; d == DialectV2 && s.NonMasqueradeCIDRs == nil && !a.Flawed["nonMasqueradeCIDRs"] {
		s.NonMasqueradeCIDRs = []netip.Prefix{}
	}
	return a
}

func (a *agentDoc) keys() []Key {
	return append(a.AgentPolicy.Keys(), Key{Name: "resyncInterval", Value: Interval(&a.resync)})
}

func (a *agentDoc) warn(line int, err error) { a.warnings = append(a.warnings, a.Locate(line, err)) }

// asKnown gives the keys the letter case in which they are known, as the agents
// do (encoding/json), and warns of what the agents pass over: keys that are
// unknown, and values that are null. The keys of those are not going to be read.
func (a *agentDoc) asKnown(members []Member, keys []Key) []Member {
	var kept []Member
	unknown := map[string]bool{}
	for _, m := range members {
		at := slices.IndexFunc(keys, func(k Key) bool { return strings.EqualFold(k.Name, m.Key) })
		switch {
		case at < 0 && unknown[m.Key]:
			a.NoteAt(m.Line, &policy.FieldError{Key: m.Key, Index: -1, Problem: "is there twice; write it once"})
			continue
		case at < 0:
			if unknown[m.Key] = true; len(unknown) <= MaxShown {
				a.warn(m.Line, unknownKey(m.Key, keys))
			}
			continue
		}
		m.Key, m.Spelled = keys[at].Name, m.Key
		if m.Err == nil && KindOf(m.Value) == Null {
			problem := "null is taken as not stated; write a value, or leave the key out"
			if keys[at].Kind == List {
				problem = "null is taken for an empty list; write [] for none, or leave the key out"
				m.Value = json.RawMessage("[]")
			} else {
				keys[at].Read = nil
			}
			a.warn(m.Line, &policy.FieldError{Key: m.Key, Index: -1, Problem: problem})
		}
		kept = append(kept, m)
	}
	if more := len(unknown) - MaxShown; more > 0 {
		a.warn(0, fmt.Errorf("%d more keys are not known, and not used; remove them", more))
	}
	return kept
}

func unknownKey(name string, keys []Key) error {
	problem := "is not a known key, and not used; remove it"
	if near := Nearest(name, keys); near != "" {
		problem = "is not a known key, and not used; did you mean " + near + "?"
	}
	return &policy.FieldError{Key: name, Index: -1, Problem: problem}
}
