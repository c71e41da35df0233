// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// masqueradingRules returns rules of third parties that give the pods' packets another source, for a
// family of families.
func masqueradingRules(family int, node netip.Addr) []thirdPartyRules {
	pods := []string{"10.1.0.0/16", "fd00:1::/64"}[family]
	nft := func(priority string) string {
		return "table " + families()[family][1] + " other {\nchain post { type nat hook postrouting priority " + priority + ";\n" +
			families()[family][1] + " saddr " + pods + " masquerade\n}\n}\n"
	}
	own := "-s " + pods + " -j MASQUERADE"
	snat := "-s " + pods + " -j SNAT --to-source " + node.String()
	return []thirdPartyRules{
		{name: "MASQUERADE first", variant: "nft", lines: "-I POSTROUTING " + own},
		{name: "MASQUERADE appended", variant: "nft", lines: "-A POSTROUTING " + own},
		{name: "MASQUERADE in legacy, first", variant: "legacy", lines: "-I POSTROUTING " + own},
		{name: "MASQUERADE in legacy, appended", variant: "legacy", lines: "-A POSTROUTING " + own},
		{name: "MASQUERADE of everything", variant: "nft", lines: "-I POSTROUTING -o lan -j MASQUERADE"},
		{name: "SNAT first", variant: "nft", lines: "-I POSTROUTING " + snat},
		{name: "SNAT appended", variant: "nft", lines: "-A POSTROUTING " + snat},
		{name: "SNAT in legacy", variant: "legacy", lines: "-I POSTROUTING " + snat},
		{name: "nft at 100", nft: nft("100")},
		{name: "nft at 110", nft: nft("110")},
	}
}

// TestEnforceExempt loads rules of third parties that masquerade exempt traffic. Without
// enforceExempt all flows of the pod to exempt destinations have a wrong source, with it none;
// masqueraded traffic and the traffic of hosts that are no pods stay as the third party wants.
func TestEnforceExempt(t *testing.T) {
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			policy := guardedPolicies()["private destinations exempt"]
			without := newGuardedNode(t, f, policy, object{"guard": nil})
			with := newGuardedNode(t, f, policy, object{"guard": nil, "enforceExempt": true})
			for i := range families() {
				for _, rules := range masqueradingRules(i, with.NodeAddr(with.LAN, masqueradedDestinations[i])) {
					t.Run(families()[i][1]+" "+rules.name, func(t *testing.T) {
						defer rules.loadFamily(t, without.node, i)()
						defer rules.loadFamily(t, with.node, i)()
						without.wantEnforced(t, i, 40)
						with.wantEnforced(t, i, 0)
					})
				}
				t.Run(families()[i][1]+" MASQUERADE of transit", func(t *testing.T) {
					transit := []string{"172.20.0.0/16", "fd00:77::/64"}[i]
					rules := thirdPartyRules{variant: "nft", lines: "-I POSTROUTING -s " + transit + " -j MASQUERADE"}
					defer rules.loadFamily(t, with.node, i)()
					to := addrPorts([]netip.Addr{netip.MustParseAddr("10.9.0.0"), netip.MustParseAddr("fd00:9::")}[i], 40)
					for destination, source := range assert.Must(with.transit.SweepUDP(to))(t) {
						if node := with.NodeAddr(with.LAN, destination.Addr()); source.Addr() != node {
							t.Errorf("transit to %s: came from %s, want %s of the third party's rule", destination, source, node)
						}
					}
				})
			}
		})
	}
}

// loadFamily loads the rules for IPv4 or IPv6 and returns a function that deletes them.
func (o thirdPartyRules) loadFamily(t *testing.T, n *node, family int) (take func()) {
	t.Helper()
	if o.nft != "" {
		n.feed(t, o.nft, "nft", "-f", "-")
		return func() { n.tool(t, "nft", "delete", "table", families()[family][1], "other") }
	}
	restore := func(line string) {
		n.feed(t, "*nat\n"+line+"\nCOMMIT\n", families()[family][0]+"-"+o.variant+"-restore", "--noflush")
	}
	restore(o.lines)
	return func() { restore("-D" + o.lines[2:]) }
}

// wantEnforced opens flows to exempt destinations and compares how many have a wrong source, and
// checks that masqueraded ones have the node's.
func (g *guardedNode) wantEnforced(t *testing.T, family, wrong int) {
	t.Helper()
	exempt := addrPorts([]netip.Addr{netip.MustParseAddr("10.9.0.0"), netip.MustParseAddr("fd00:9::")}[family], 40)
	got := 0
	for to, source := range assert.Must(g.a.SweepUDP(exempt))(t) {
		if source.Addr() != g.a.addr(to.Addr()) {
			got++
		}
	}
	if got != wrong {
		t.Errorf("%d of %d exempt UDP flows have a wrong source, want %d", got, len(exempt), wrong)
	}
	for _, to := range exempt[:5] {
		seen := assert.Must(g.a.SendTCP(to))(t)
		if (seen.Source.Addr() == g.a.addr(to.Addr())) != (wrong == 0) {
			t.Errorf("an exempt TCP flow came from %s", seen.Source)
		}
	}
	for to, source := range assert.Must(g.a.SweepUDP(addrPorts(masqueradedDestinations[family], 40)))(t) {
		if !g.isNodeAddr(source.Addr()) {
			t.Errorf("to %s: came from %s, want the node's address", to, source)
		}
	}
}

// TestEnforceExemptBesideOtherChain: another chain counts for the sources in its sourceCIDRs alone, on every interface, and
// the number of its outputInterfaces changes no rule: the kernel takes no rule of more than 128 expressions. Another program
// masquerades everything.
func TestEnforceExemptBesideOtherChain(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.conflist(t, "podnet", object{
			"nonMasqueradeNamespaces": []string{"prod"}, "enforceExempt": true, "nonMasqueradeCIDRs": []string{"9.0.0.0/8", "10.9.0.0/24"},
		})
		prod, dev, other := n.podOf(t, "prod"), n.podOf(t, "dev"), n.podOf(t, "dev")
		var interfaces []string
		for i := range 61 {
			interfaces = append(interfaces, fmt.Sprintf("out%d", i))
		}
		n.conflist(t, "second", object{
			"masqChain": "SECOND", "outputInterfaces": append(interfaces, "outside"), "nonMasqueradeCIDRs": []string{},
			"sourceCIDRs": []string{other.addrs[0].String() + "/32"},
		})
		n.pod(t, "second")
		rules := masqueradingRules(0, netip.Addr{})
		defer rules[len(rules)-1].loadFamily(t, n, 0)()
		n.leaves(t, dev.Host, "10.9.0.1", n.LAN, dev.addrs[0].String())    // exempt, and no source of the other chain
		n.leaves(t, dev.Host, "9.9.9.9", n.Outside, dev.addrs[0].String()) // the same
		n.leaves(t, other.Host, "10.9.0.1", n.LAN, "")                     // not bound, whatever interface the other chain names
		n.leaves(t, dev.Host, "10.9.1.1", n.LAN, "")                       // masqueraded by its own
		n.leaves(t, prod.Host, "10.9.1.1", n.LAN, prod.addrs[0].String())  // by its namespace
		n.wantSays(t, 0, nil, "check")
		unbound := []string{"enforceExempt does not protect", other.addrs[0].String(), "10.9.0.0/24", "chain SECOND"}
		n.wantSays(t, 0, append(unbound, "problem: enforce-exempt-unbound"), "doctor")
		n.wantSays(t, 0, unbound, "explain", "10.9.0.1", "--from", other.addrs[0].String())
		if said := n.wantSays(t, 0, nil, "explain", "10.9.0.1", "--from", dev.addrs[0].String()); strings.Contains(said, "SECOND does not exempt") {
			t.Errorf("explain of a pod that the other chain is not about:\n%s", said)
		}
	})
}

// TestEnforceExemptHarmless checks that enforceExempt leaves alone what others masquerade on
// purpose: marked packets, hairpin flows without a mark, and traffic of hosts that are no pods.
func TestEnforceExemptHarmless(t *testing.T) {
	for _, f := range backends()[:2] {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			checkHarmless(t, f, guardedPolicies()["private destinations exempt"], object{"enforceExempt": true})
		})
	}
}
