// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// TestConnectionCounters checks that connections_total counts each connection once by its verdict,
// and keeps the counts when a repair replaces the rules.
func TestConnectionCounters(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		policy := "nonMasqueradeCIDRs: [10.0.0.0/8]\nresyncInterval: 1s\n" +
			"sourceCIDRs: [10.1.0.0/16]\nmasqueradeHost: false\n" // the node itself sends IGMP
		n.agentFile(t, "ip-masq-agent", policy)
		d := n.startReconciler(t).untilReady(t)
		n.write(t, "podnet", n.bridge("podnet"))
		p := n.pod(t, "podnet")
		send := func(times int) {
			t.Helper()
			for range times {
				for _, to := range []string{"10.20.0.5", "198.51.100.7"} {
					dst := netip.AddrPortFrom(netip.MustParseAddr(to), topology.EchoPort)
					topology.Must(p.SendUDP(dst))(t)
				}
			}
		}
		count := func(action string) float64 {
			return d.metric(t, "connections_total", `action="`+action+`"`, `family="ipv4"`)
		}
		want := func(exempt, masqueraded float64) {
			t.Helper()
			d.until(t, "current counters", func() bool { return count("exempt") >= exempt && count("masquerade") >= masqueraded })
			if e, m := count("exempt"), count("masquerade"); e != exempt || m != masqueraded {
				t.Errorf("%v exempt and %v masqueraded, want %v and %v", e, m, exempt, masqueraded)
			}
		}
		send(3)
		want(3, 3)
		repaired := d.metric(t, "reconciles_total", `result="repaired"`)
		n.flushMasqChain(t)
		d.until(t, "repair", func() bool { return d.metric(t, "reconciles_total", `result="repaired"`) > repaired })
		want(3, 3)
		send(2)
		want(5, 5)
		// The chain of enforceExempt decides before the masquerade chain.
		n.agentFile(t, "ip-masq-agent", policy+"enforceExempt: true\n")
		d.until(t, "enforceExempt", func() bool { return strings.Contains(d.scrape(t), "guard_active{") })
		send(4)
		want(9, 9)
	})
}

// flushMasqChain removes the rules of the owned chain.
func (n *node) flushMasqChain(t *testing.T) {
	t.Helper()
	if n.backend.variant == "" {
		n.tool(t, "nft", "flush", "chain", "ip", "ip-masq", "masq-IP-MASQ-AGENT")
		return
	}
	n.tool(t, "iptables", "-t", "nat", "-F", "IP-MASQ-AGENT")
}
