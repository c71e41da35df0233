// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"fmt"
	"net/http"
	"net/netip"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// conflicting is an entry that masquerades a destination that agentConfig exempts.
const conflicting = `configMapGenerator:
- name: ip-masq
  namespace: kube-system
  behavior: merge
  literals:
  - 'entry.json={"type": "ip-masq", "backend": "nftables", "masqueradeCIDRs": ["198.51.100.0/24"]}'
`

// TestConflict gives a cluster a valid ConfigMap that conflicts with the conflist. It checks that
// the conflict is reported and pods still start.
func TestConflict(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, cluster.Options{ProxyMode: "nftables"})
	must(t, c.ApplyOverlay(ctx, conflicting+component("metrics"), "base"))
	awaitRollout(t, c, "ip-masq")
	const metric = `ip_masq_policy_conflict{chain="IP-MASQ-AGENT"} `
	for _, n := range c.Nodes {
		expectMetric(t, n, metric+"0")
	}

	must(t, c.Apply(ctx, agentConfig))
	for _, n := range c.Nodes {
		must(t, cluster.Await(ctx, cluster.Patience, func() error {
			status, text, err := n.Readyz(ctx)
			if err == nil && (status != http.StatusServiceUnavailable ||
				!containsAll(text, "conflict", "198.51.100.0/24", "agent files", `network "pods"`)) {
				err = fmt.Errorf("/readyz of %s: %d %s; want both sources and the conflicting keys", n.Name, status, text)
			}
			return err
		}))
		expectMetric(t, n, metric+"1")
		if ready, message, err := n.Ready(ctx); err != nil || !ready {
			t.Errorf("%s is ready: %t, %s, %v", n.Name, ready, message, err)
		}
	}
	// The network's policy is in force, and that of the ConfigMap as far as it does not conflict.
	startAndStop(t, c, func(n *cluster.Node, pod netip.Addr) []want {
		return []want{
			{netip.MustParseAddr("198.51.100.7"), topology.EchoPort, "outside", n.Address},
			{c.World.LAN.Addrs[0], topology.EchoPort, "lan", pod},
		}
	})

	_ = topology.Must(c.Kubectl(ctx, "delete", "configmap", "-n", "kube-system", "ip-masq-agent"))(t)
	for _, n := range c.Nodes {
		awaitReadyz(t, n)
		expectMetric(t, n, metric+"0")
	}
}

// expectMetric waits until a node's metrics have the line.
func expectMetric(t *testing.T, n *cluster.Node, line string) {
	t.Helper()
	must(t, cluster.Await(t.Context(), cluster.Patience, func() error {
		text, err := n.Metrics(t.Context())
		if err == nil && !containsAll("\n"+text, "\n"+line+"\n") {
			err = fmt.Errorf("metrics of %s have no line %q:\n%s", n.Name, line, text)
		}
		return err
	}))
}
