// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
)

// prefixesOf24 returns count /24 prefixes, starting with the nth.
func prefixesOf24(nth, count int) []string {
	list := make([]string, 0, count)
	for i := nth; i < nth+count; i++ {
		list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(11 + i>>16), byte(i >> 8), byte(i), 0}), 24).String())
	}
	return list
}

// interfaceNames returns count interface names. The interfaces do not exist.
func interfaceNames(prefix string, count int) []string {
	list := make([]string, 0, count)
	for i := range count {
		list = append(list, fmt.Sprint(prefix, i))
	}
	return list
}

// singlePorts returns a value of toPorts with count ranges of one port each.
func singlePorts(count int) string {
	list := make([]string, 0, count)
	for i := range count {
		list = append(list, fmt.Sprint(1024+2*i))
	}
	return strings.Join(list, ",")
}

// policyState returns the rules, the documents and the record of the node, without attachments.
func (n *node) policyState(t *testing.T) snapshot {
	t.Helper()
	return snapshot{n.ruleset(t), tree(t, filepath.Join(n.dataDir, "sources")) + string(readFile(t, filepath.Join(n.dataDir, "record.json")))}
}

// wantPolicyState fails the test if rules, documents or record differ from before.
func (n *node) wantPolicyState(t *testing.T, before snapshot) {
	t.Helper()
	now := n.policyState(t)
	wantSame(t, "rules", now.rules, before.rules)
	wantSame(t, "documents and record", now.state, before.state)
}

// bound is an entry that exceeds a limit on the number of rules, and what the error must contain.
type bound struct {
	name string
	keys object
	msgs []string
	// iptablesOnly means that nftables needs only one rule, with sets.
	iptablesOnly bool
}

func bounds() []bound {
	return []bound{{
		name: "pairs",
		keys: object{"sourceCIDRs": prefixesOf24(0, 1000), "outputInterfaces": interfaceNames("i", 1000)},
		msgs: []string{"sourceCIDRs: ", "1000", "outputInterfaces", "1000000 pairs", "4096"},
	}, {
		name: "port ranges",
		keys: object{"toPorts": singlePorts(4000), "masqueradeCIDRs": prefixesOf24(0, 60)},
		msgs: []string{"toPorts: ", "4000 ranges", "64"},
	}, {
		name:         "rules",
		keys:         object{"toPorts": singlePorts(64), "masqueradeCIDRs": prefixesOf24(0, 339), "cidrLimit": 1000},
		msgs:         []string{"339 masqueradeCIDRs", "64 ranges of toPorts", "65624", "65536", "nftables"},
		iptablesOnly: true,
	}}
}

// TestBounds checks that ADD refuses an entry that needs more rules than a chain may have, before
// it generates rules, and accepts an entry at the limit.
func TestBounds(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", nil)
		n.addAndCheck(t, conf)
		n.addAndCheck(t, conf) // fills the verification cache
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
				for _, network := range []string{"podnet", "blue"} { // with and without a stored document
					refused := n.conf(t, network, b.keys)
					n.invoke(t, invocation{verb: "ADD", conf: refused, id: "refused"}).want(t, 7, b.msgs...)
					n.invoke(t, invocation{verb: "DEL", conf: refused, id: "refused"}).want(t, 0)
				}
				n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
				n.wantPolicyState(t, before)
			})
		}
		for name, keys := range map[string]object{
			"pairs at the limit":          {"sourceCIDRs": prefixesOf24(0, 64), "outputInterfaces": interfaceNames("i", 64)},
			"exempt sources at the limit": {"nonMasqueradeSourceCIDRs": prefixesOf24(0, 4096)},
			"pod ranges at the limit":     {"podCIDRs": prefixesOf24(0, 4096), "guard": "drop"},
			"rules at the limit":          {"toPorts": singlePorts(64), "masqueradeCIDRs": prefixesOf24(0, 338), "cidrLimit": 1000},
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

// TestBoundsAcrossNetworks checks the limits for several networks together. ADD of the network that
// exceeds a limit fails; ADDs of stored networks and of later ones succeed.
func TestBoundsAcrossNetworks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name          string
		first, second object
		msgs          []string
		backends      []backend
		backend       string // of all entries; "" for the backend's own
	}{{
		name:     "exempt sources",
		first:    object{"nonMasqueradeSourceCIDRs": prefixesOf24(0, 4000)},
		second:   object{"nonMasqueradeSourceCIDRs": prefixesOf24(3990, 107)},
		msgs:     []string{"nonMasqueradeSourceCIDRs", "4097", "4096"},
		backends: backends()[:1],
	}, {
		name:     "rules",
		first:    object{"toPorts": singlePorts(64), "masqueradeCIDRs": prefixesOf24(0, 30)},
		second:   object{"masqueradeCIDRs": prefixesOf24(1000, 310), "cidrLimit": 400},
		msgs:     []string{"340 masqueradeCIDRs", "64 ranges of toPorts", "65817", "65536", "nftables"},
		backends: backends()[1:],
	}, {
		name:     "rules where auto chooses iptables",
		first:    object{"toPorts": singlePorts(64), "masqueradeCIDRs": prefixesOf24(0, 30)},
		second:   object{"masqueradeCIDRs": prefixesOf24(1000, 310), "cidrLimit": 400},
		msgs:     []string{"340 masqueradeCIDRs", "64 ranges of toPorts", "65817", "65536", "nftables"},
		backends: backends()[1:],
		backend:  "auto",
	}} {
		for _, f := range c.backends {
			t.Run(c.name+"/"+f.name, func(t *testing.T) {
				n := newNode(t, f)
				if c.backend != "" {
					n.backend.setting = c.backend
				}
				first, second := n.conf(t, "first", c.first), n.conf(t, "second", c.second)
				n.addAndCheck(t, first)
				n.addAndCheck(t, first)
				before := n.policyState(t)
				n.invoke(t, invocation{verb: "ADD", conf: second, id: "second"}).want(t, 7, append(c.msgs, `network "second"`)...)
				n.invoke(t, invocation{verb: "DEL", conf: second, id: "second"}).want(t, 0)
				n.wantPolicyState(t, before)
				// Agent files that exceed the limit change nothing either.
				n.agentFile(t, "ip-masq-agent", string(marshalIndent(t, c.second)))
				n.wantSays(t, 1, append(c.msgs, "the agent files"), append([]string{"once"}, n.agentArgs(n.agentDir())...)...)
				n.wantPolicyState(t, before)
				n.addAndCheck(t, n.conf(t, "third", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}))
				n.addAndCheck(t, first)
			})
		}
	}
}
