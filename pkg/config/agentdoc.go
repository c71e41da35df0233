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

// Dialect is which of the agents the agents' files are written for.
type Dialect string

// The values of agent_dialect. They differ in a file that is there and does not
// have the key nonMasqueradeCIDRs: with ip-masq-agent it leaves the list to
// others, with ip-masq-agent-v2 it means none.
const (
	DialectV1 Dialect = "v1"
	DialectV2 Dialect = "v2"
)

// AgentPolicy is what [agent] and the agents' flags state: policy beside the
// files.
type AgentPolicy struct {
	Policy    policy.SourcePolicy // its Chain is "" where none is stated
	CIDRLimit int                 // 0 for DefaultCIDRLimit

	written form // where the file has its keys; flags have no lines
}

// Equal reports whether both state the same, wherever it is written.
func (a AgentPolicy) Equal(b AgentPolicy) bool {
	return a.Policy.Equal(b.Policy) && a.CIDRLimit == b.CIDRLimit
}

// doc returns the policy as a document beside the agents' files.
func (a AgentPolicy) doc() *agentDoc {
	w := a.written
	return &agentDoc{form: form{file: OwnPolicy, settings: w.file, lines: w.lines, places: w.places}, AgentPolicy: a}
}

// keys is the table of what an agent document and [agent] have in common.
func (a *AgentPolicy) keys() []key {
	keys := append(policyKeys(&a.Policy), key{"cidrLimit", count(&a.CIDRLimit, 1, policy.MaxCIDRLimit)})
	for i := range keys {
		if keys[i].name == "masqChain" {
			// No chain is one that is not stated, so a name that is empty has to be refused here.
			keys[i].read = text(policy.DefaultChain, parseChain, func(c string) { a.Policy.Chain = c })
		}
	}
	return keys
}

func parseChain(s string) (string, error) { return s, policy.ValidateChainName(s) }

// judge judges the policy by itself. IPv6 tells whether it is enabled for it.
func (a AgentPolicy) judge(f *form, ipv6 bool) {
	s, limit := a.Policy, a.CIDRLimit
	if s.Chain == "" {
		s.Chain = policy.DefaultChain
	}
	if limit == 0 {
		limit = policy.DefaultCIDRLimit
	}
	s.EnableIPv6 = &ipv6
	f.validate(s, limit)
}

// agentDoc is one document of the agent files, or what takes part beside them.
type agentDoc struct {
	form
	AgentPolicy
	resync   time.Duration // 0 where it states none
	unread   bool          // nobody knows what it states
	warnings []error
}

// parseAgentDoc reads a file. What is wrong with it is in its form, and is not
// all until it is judged.
func parseAgentDoc(path string, doc []byte, d Dialect, decode document.Decoder) *agentDoc {
	a := &agentDoc{form: form{file: path}}
	members, more, err := agentMembers(path, doc, decode)
	if err != nil {
		a.unread, a.mistakes = true, []error{err}
		return a
	}
	if more {
		a.warn(0, errors.New("another document follows the first, which alone is read; join them, or write one file for each"))
	}
	keys := a.keys()
	a.read(a.asKnown(members, keys), keys)
	if s := &a.Policy; d == DialectV2 && s.NonMasqueradeCIDRs == nil && !a.flawed["nonMasqueradeCIDRs"] {
		s.NonMasqueradeCIDRs = []netip.Prefix{}
	}
	return a
}

func (a *agentDoc) keys() []key {
	return append(a.AgentPolicy.keys(), key{"resyncInterval", interval(&a.resync)})
}

func (a *agentDoc) warn(line int, err error) { a.warnings = append(a.warnings, a.located(line, err)) }

// asKnown gives the keys the letter case in which they are known, as the agents
// do (encoding/json), and warns of what the agents pass over: keys that are
// unknown, and values that are null. The keys of those are not going to be read.
func (a *agentDoc) asKnown(members []member, keys []key) []member {
	var kept []member
	unknown := map[string]bool{}
	for _, m := range members {
		at := slices.IndexFunc(keys, func(k key) bool { return strings.EqualFold(k.name, m.key) })
		switch {
		case at < 0 && unknown[m.key]:
			a.noteAt(m.line, &policy.FieldError{Key: m.key, Index: -1, Problem: "is there twice; write it once"})
			continue
		case at < 0:
			if unknown[m.key] = true; len(unknown) <= mostShown {
				a.warn(m.line, unknownKey(m.key, keys))
			}
			continue
		}
		m.key, m.spelled = keys[at].name, m.key
		if m.err == nil && kindOf(m.value) == nothing {
			problem := "null is taken as not stated; write a value, or leave the key out"
			if takes(new(agentDoc).keys()[at], "[]") {
				problem = "null is taken for an empty list; write [] for none, or leave the key out"
				m.value = json.RawMessage("[]")
			} else {
				keys[at].read = nil
			}
			a.warn(m.line, &policy.FieldError{Key: m.key, Index: -1, Problem: problem})
		}
		kept = append(kept, m)
	}
	if more := len(unknown) - mostShown; more > 0 {
		a.warn(0, fmt.Errorf("%d more keys are not known, and not used; remove them", more))
	}
	return kept
}

func unknownKey(name string, keys []key) error {
	problem := "is not a known key, and not used; remove it"
	if near := nearest(name, keys); near != "" {
		problem = "is not a known key, and not used; did you mean " + near + "?"
	}
	return &policy.FieldError{Key: name, Index: -1, Problem: problem}
}
