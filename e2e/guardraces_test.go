// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// TestGuardDuringRemovals removes the rules again and again while the reconciler repairs them and a
// pod opens flows. No flow arrives with a wrong source; the first packets of some are dropped.
func TestGuardDuringRemovals(t *testing.T) {
	for _, f := range backends()[:2] {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, f)
			n.conflist(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"10.9.0.0/16", "fd00:9::/32"}, "guard": "drop"})
			p := n.pod(t, "podnet")
			d := n.startReconciler(t).untilReady(t)
			load := topology.Must(p.StartLoad(loadDestinations()))(t)
			const removals = 10
			for range removals {
				for _, family := range families() {
					if f.variant == "" {
						_, _, _ = run(t, n.Node.Command(n.timeout(t), "nft", "delete", "table", family[1], "ip-masq")) // may be missing still
					} else {
						n.tool(t, family[0], "-t", "nat", "-F")
					}
				}
				time.Sleep(3 * time.Second / removals)
			}
			report := topology.Must(load.Stop())(t)
			n.checkFlows(t, p, report.Flows, nil)
			const fewest = 3000
			t.Logf("%d connections sent, %d seen, %d packets dropped by the guard", report.Sent, len(report.Flows), n.guardPackets(t, "IP-MASQ-AGENT"))
			if len(report.Flows) < fewest {
				t.Errorf("%d connections seen, want at least %d", len(report.Flows), fewest)
			}
			d.eventuallyReady(t)
			n.tool(t, "nft", "flush", "ruleset")
			d.until(t, "repair", func() bool {
				return strings.Contains(n.ruleset(t), "counter drop") && strings.Contains(strings.ToLower(n.rules(t)), "masquerade")
			})
			d.eventuallyReady(t)
			onlyPod(p).verdicts(t, n, true, map[string]string{"pod": "1.2.3.4 2001:db8:5::4"})
			onlyPod(p).verdicts(t, n, false, map[string]string{"pod": "10.9.9.9 fd00:9::9"})
		})
	}
}
