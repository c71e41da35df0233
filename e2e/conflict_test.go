// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// conflict is a pair of entries of two networks that conflict.
type conflict struct {
	name          string
	first, second object
	msgs          []string
	scope         bool
}

func conflicts() []conflict {
	return []conflict{{
		name:  "a scalar",
		first: object{"randomFully": false}, second: object{"randomFully": true},
		msgs: []string{`randomFully of network "second" is true, which conflicts with randomFully of network "first", false`},
	}, {
		name:   "a prefix",
		first:  object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "10.9.0.0/16"}},
		second: object{"masqueradeCIDRs": []string{"10.9.0.0/16"}},
		msgs:   []string{`masqueradeCIDRs of network "second" is 10.9.0.0/16, which conflicts with nonMasqueradeCIDRs of network "first", 10.9.0.0/16`},
	}, {
		name:  "two scopes",
		first: object{"outputInterfaces": []string{"eth0"}}, second: object{"outputInterfaces": []string{"eth1"}}, scope: true,
		msgs: []string{`outputInterfaces of network "second" is eth1, which conflicts with outputInterfaces of network "first", eth0`},
	}}
}

// TestNetworksConflict checks that ADD and STATUS of a conflicting network fail with both values
// and a remedy, that the first network's policy stays in force, and that the remedy works.
func TestNetworksConflict(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		for _, c := range conflicts() {
			t.Run(c.name, func(t *testing.T) {
				first := n.conf(t, "first", c.first)
				n.addAndCheck(t, first)
				rules, documents := n.ruleset(t), n.documentStamps(t)
				msgs := slices.Concat(c.msgs, []string{"chain IP-MASQ-AGENT: ", "the latter is in force", "make them agree"})
				if c.scope {
					msgs = append(msgs, "or give one of them another masqChain")
				}
				second := n.conf(t, "second", c.second)
				for _, verb := range []string{"ADD", "ADD", "STATUS"} {
					n.invoke(t, invocation{verb: verb, conf: second}).want(t, map[string]uint{"ADD": 7, "STATUS": 50}[verb], msgs...)
				}
				n.invoke(t, invocation{verb: "DEL", conf: second}).want(t, 0).noWarnings(t)
				n.addAndCheck(t, first).noWarnings(t)
				wantSame(t, "rules", n.ruleset(t), rules)
				wantSame(t, "documents", n.documentStamps(t), documents)
				// Apply the remedy.
				c.second["masqChain"] = "SECOND"
				n.addAndCheck(t, n.conf(t, "second", c.second))
				n.addAndCheck(t, first).noWarnings(t)
				n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
				n.removeRulesAndState(t)
			})
		}
	})
}

// removeRulesAndState removes all rules and the dataDir of the node.
func (n *node) removeRulesAndState(t *testing.T) {
	t.Helper()
	n.flush(t)
	if n.backend.variant != "" {
		for _, f := range families() {
			n.tool(t, f[0], "-t", "nat", "-X")
		}
	}
	must(t, os.RemoveAll(n.dataDir))
}

// TestConflictAfterConflistRemoval checks that a conflicting network supersedes the network in
// force once only the former has a conflist, and the reverse.
func TestConflictAfterConflistRemoval(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		keys := map[string]object{"first": {"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}, "second": {"masqueradeCIDRs": []string{"10.0.0.0/8"}}}
		first, second := n.conf(t, "first", keys["first"]), n.conf(t, "second", keys["second"])
		n.addAndCheck(t, first)
		wantConflict := func(conf string) {
			t.Helper()
			rules := n.ruleset(t)
			n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 7, "CIDRs of network", "10.0.0.0/8", "the latter is in force")
			wantSame(t, "rules", n.ruleset(t), rules)
		}
		wantSuperseded := func(conf, msgs string) {
			t.Helper()
			n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
			n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, msgs)
			n.addAndCheck(t, conf).noWarnings(t)
		}
		path := n.standardConflist(t, "first", keys["first"])
		wantConflict(second) // only the first network has a conflist
		n.standardConflist(t, "second", keys["second"])
		wantConflict(second) // both have one
		must(t, os.Remove(path))
		n.addAndCheck(t, first).noWarnings(t) // in force until the second network's ADD
		wantSuperseded(second, `network "first" is no longer in any conflist and is superseded by network "second"`)
		wantConflict(first)
		n.addAndCheck(t, second).noWarnings(t)
		n.standardConflist(t, "first", keys["first"])
		wantConflict(first)
		must(t, os.Remove(filepath.Join(filepath.Dir(path), "10-second.conflist")))
		wantSuperseded(first, `network "second" is no longer in any conflist and is superseded by network "first"`)
		n.addAndCheck(t, first).noWarnings(t)
		n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
		must(t, os.Remove(path))
	})
}
