// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// prefixesOf24 returns count prefixes of 24 bits, from the nth on.
func prefixesOf24(nth, count int) []string {
	list := make([]string, 0, count)
	for i := nth; i < nth+count; i++ {
		list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(11 + i>>16), byte(i >> 8), byte(i), 0}), 24).String())
	}
	return list
}

// interfaceNames returns names of interfaces that need not exist.
func interfaceNames(prefix string, count int) []string {
	list := make([]string, 0, count)
	for i := range count {
		list = append(list, fmt.Sprint(prefix, i))
	}
	return list
}

// singlePorts returns toPorts of so many ranges of one port each.
func singlePorts(count int) string {
	list := make([]string, 0, count)
	for i := range count {
		list = append(list, fmt.Sprint(1024+2*i))
	}
	return strings.Join(list, ",")
}

// policyState is what is in force on the node: the rules, the documents and what
// is owned. Attachments are no part of it.
func (n *node) policyState(t *testing.T) snapshot {
	t.Helper()
	return snapshot{n.ruleset(t), tree(t, filepath.Join(n.dataDir, "sources")) + string(readFile(t, filepath.Join(n.dataDir, "record.json")))}
}

// inForce fails the test if something else is in force than before.
func (n *node) wantPolicyState(t *testing.T, before snapshot) {
	t.Helper()
	if d := cmp.Diff(before, n.policyState(t), cmp.AllowUnexported(snapshot{})); d != "" {
		t.Errorf("what is in force changed:\n%s", abbreviate(d))
	}
}

// bound is an entry that asks for more rules than are possible, and what the
// error has to say.
type bound struct {
	name string
	keys object
	says []string
	// iptablesOnly: with sets it is one rule.
	iptablesOnly bool
}

func bounds() []bound {
	return []bound{{
		name: "pairs",
		keys: object{"sourceCIDRs": prefixesOf24(0, 1000), "outputInterfaces": interfaceNames("i", 1000)},
		says: []string{"sourceCIDRs: ", "1000", "outputInterfaces", "1000000 pairs", "4096"},
	}, {
		name: "one list of pairs",
		keys: object{"outputInterfaces": interfaceNames("i", 4097)},
		says: []string{"outputInterfaces: ", "4097", "4096"},
	}, {
		name: "exempt sources",
		keys: object{"nonMasqueradeSourceCIDRs": prefixesOf24(0, 4097)},
		says: []string{"nonMasqueradeSourceCIDRs: ", "4097", "4096"},
	}, {
		name: "ranges of ports",
		keys: object{"toPorts": singlePorts(4000), "masqueradeCIDRs": prefixesOf24(0, 60)},
		says: []string{"toPorts: ", "4000 ranges", "64"},
	}, {
		name:         "rules",
		keys:         object{"toPorts": singlePorts(64), "masqueradeCIDRs": prefixesOf24(0, 339), "cidrLimit": 1000},
		says:         []string{"339 masqueradeCIDRs", "64 ranges of toPorts", "65624", "65536", "nftables"},
		iptablesOnly: true,
	}}
}

// TestBounds: an entry that asks for more rules than a chain may have is refused
// before anything is made of it, and what is at the bounds is not.
func TestBounds(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", nil)
		n.addAndCheck(t, conf)
		n.addAndCheck(t, conf) // and has it on record that nothing is to be done
		before := n.policyState(t)
		for _, b := range bounds() {
			t.Run(b.name, func(t *testing.T) {
				if b.iptablesOnly && n.backend.setting != "iptables" {
					n.addAndCheck(t, n.conf(t, "blue", b.keys))
					n.removeRulesAndState(t)
					n.addAndCheck(t, conf)
					n.addAndCheck(t, conf)
					before = n.policyState(t)
					return
				}
				for _, network := range []string{"podnet", "blue"} { // stored already, and not
					refused := n.conf(t, network, b.keys)
					n.invoke(t, invocation{verb: "ADD", conf: refused, id: "refused"}).want(t, 7, b.says...)
					n.invoke(t, invocation{verb: "DEL", conf: refused, id: "refused"}).want(t, 0)
				}
				n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
				n.wantPolicyState(t, before)
			})
		}
		for name, keys := range map[string]object{
			"as many pairs":          {"sourceCIDRs": prefixesOf24(0, 64), "outputInterfaces": interfaceNames("i", 64)},
			"as many exempt sources": {"nonMasqueradeSourceCIDRs": prefixesOf24(0, 4096)},
			"as many rules":          {"toPorts": singlePorts(64), "masqueradeCIDRs": prefixesOf24(0, 338), "cidrLimit": 1000},
		} {
			t.Run(name, func(t *testing.T) {
				n.removeRulesAndState(t)
				conf := n.conf(t, "podnet", keys)
				n.addAndCheck(t, conf)
				n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
			})
		}
	})
}

// TestBoundsAcrossNetworks: what several networks ask for together is bounded too.
// The one that asks for more fails; those in force and others that come do not.
func TestBoundsAcrossNetworks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name          string
		first, second object
		says          []string
		form          []backend
		backend       string // of all of them; "" for the form's
	}{{
		name:   "exempt sources",
		first:  object{"nonMasqueradeSourceCIDRs": prefixesOf24(0, 4000)},
		second: object{"nonMasqueradeSourceCIDRs": prefixesOf24(3990, 107)},
		says:   []string{"nonMasqueradeSourceCIDRs", "4097", "4096"},
		form:   backends(),
	}, {
		name:   "rules",
		first:  object{"toPorts": singlePorts(64), "masqueradeCIDRs": prefixesOf24(0, 30)},
		second: object{"masqueradeCIDRs": prefixesOf24(1000, 310), "cidrLimit": 400},
		says:   []string{"340 masqueradeCIDRs", "64 ranges of toPorts", "65817", "65536", "nftables"},
		form:   backends()[1:],
	}, {
		name:    "rules where auto chooses iptables",
		first:   object{"toPorts": singlePorts(64), "masqueradeCIDRs": prefixesOf24(0, 30)},
		second:  object{"masqueradeCIDRs": prefixesOf24(1000, 310), "cidrLimit": 400},
		says:    []string{"340 masqueradeCIDRs", "64 ranges of toPorts", "65817", "65536", "nftables"},
		form:    backends()[1:],
		backend: "auto",
	}} {
		for _, f := range c.form {
			t.Run(c.name+"/"+f.name, func(t *testing.T) {
				n := newNode(t, f)
				if c.backend != "" {
					n.backend.setting = c.backend
				}
				first, second := n.conf(t, "first", c.first), n.conf(t, "second", c.second)
				n.addAndCheck(t, first)
				n.addAndCheck(t, first)
				before := n.policyState(t)
				n.invoke(t, invocation{verb: "ADD", conf: second, id: "second"}).want(t, 7, append(c.says, `network "second"`)...)
				n.invoke(t, invocation{verb: "DEL", conf: second, id: "second"}).want(t, 0)
				n.wantPolicyState(t, before)
				// Agent files that ask for as much do not change anything either.
				n.agentFile(t, "ip-masq-agent", string(marshalIndent(t, c.second)))
				_, stderr, code := n.reconciler(t, append([]string{"once"}, n.agentArgs(n.agentDir())...)...)
				if code != 1 {
					t.Errorf("once: exit code %d, want 1\n%s", code, stderr)
				}
				for _, s := range append(c.says, "the agent files") {
					if !strings.Contains(stderr, s) {
						t.Errorf("once does not say %q:\n%s", s, abbreviate(stderr))
					}
				}
				n.wantPolicyState(t, before)
				n.addAndCheck(t, n.conf(t, "third", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}))
				n.addAndCheck(t, first)
			})
		}
	}
}
