// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// iptablesEntry sets the backend, so that no other is chosen.
const iptablesEntry = `configMapGenerator:
- name: ip-masq
  namespace: kube-system
  behavior: merge
  literals:
  - 'entry.json={"type": "ip-masq", "backend": "iptables"}'
`

// TestBrokenNode breaks and repairs a node and checks what kubectl describe node and the pods'
// events report.
func TestBrokenNode(t *testing.T) {
	c := newCluster(t, cluster.Options{ProxyMode: "nftables"})
	must(t, c.ApplyOverlay(t.Context(), iptablesEntry, "overlays/iptables"))
	awaitRollout(t, c, "ip-masq")
	n := c.Nodes[0]
	must(t, c.Start(t.Context(), cluster.Pod{Name: "first", Node: n}))
	t.Run("entry", func(t *testing.T) { brokenEntry(t, c, n) })
	t.Run("backend", func(t *testing.T) { brokenBackend(t, c, n) })
}

// brokenBackend removes iptables and the rules from the node while no reconciler runs.
func brokenBackend(t *testing.T, c *cluster.Cluster, n *cluster.Node) {
	ctx := t.Context()
	takeDown(t, c, "overlays/iptables")
	must(t, n.Run(ctx, "mount", "--bind", "/dev/null", "/usr/sbin/xtables-nft-multi"))
	must(t, n.Run(ctx, "nft", "delete", "table", "ip", "nat"))
	awaitNotReady(t, n, "ip-masq", "iptables")
	described := topology.Must(c.Kubectl(ctx, "describe", "node", n.Name))(t)
	for line := range strings.Lines(described) {
		if strings.Contains(line, "NetworkReady=false") {
			t.Log(line)
		}
	}
	must(t, n.Run(ctx, "umount", "/usr/sbin/xtables-nft-multi"))
	must(t, n.AwaitReady(ctx))
	must(t, c.Start(ctx, cluster.Pod{Name: "mended", Node: n}))
	expect(t, "mended", c.FromPod("mended"), want{c.World.Outside.Addrs[0], topology.EchoPort, "outside", n.Address})
}

// brokenEntry writes an invalid key into the conflist.
func brokenEntry(t *testing.T, c *cluster.Cluster, n *cluster.Node) {
	ctx := t.Context()
	good := string(topology.Must(os.ReadFile(n.Path(cluster.ConflistPath)))(t))
	bad := strings.Replace(good, `"type": "ip-masq"`, `"type": "ip-masq", "nonMasqueradeCIDRs": ["10.0.1.24/24"]`, 1)
	if bad == good {
		t.Fatalf("there is no entry to spoil: %s", good)
	}
	message := []string{"nonMasqueradeCIDRs[0]: 10.0.1.24/24"}
	failed := append([]string{"FailedCreatePodSandBox", `plugin type="ip-masq" failed (add)`}, message...)
	// kubelet calls ADD until it has polled the status.
	seen := ""
	for i := 0; !containsAll(seen, failed...); i++ {
		if i == 10 {
			t.Fatalf("no failing ADD was shown in ten tries:\n%s", seen)
		}
		name := fmt.Sprintf("unlucky-%d", i)
		must(t, n.WriteFile(cluster.ConflistPath, bad, 0o644))
		must(t, c.Create(ctx, cluster.Pod{Name: name, Node: n}))
		awaitNotReady(t, n, message...)
		seen = c.Events(ctx, name)
		must(t, n.WriteFile(cluster.ConflistPath, good, 0o644))
		must(t, n.AwaitReady(ctx))
		topology.Must(c.AwaitRunning(ctx, name))(t)
		must(t, c.Delete(ctx, name))
	}
	t.Log(seen)
}

// awaitNotReady waits until kubectl describe node reports the node as not ready with all of the
// texts.
func awaitNotReady(t *testing.T, n *cluster.Node, why ...string) {
	t.Helper()
	must(t, cluster.Await(t.Context(), cluster.Patience, func() error {
		ready, message, err := n.Ready(t.Context())
		if err == nil && (ready || !containsAll(message, why...)) {
			err = fmt.Errorf("node is ready: %t, %q; want it not ready with all of %q", ready, message, why)
		}
		return err
	}))
}

func containsAll(text string, parts ...string) bool {
	for _, part := range parts {
		if !strings.Contains(text, part) {
			return false
		}
	}
	return true
}
