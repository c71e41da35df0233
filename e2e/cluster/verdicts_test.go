// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// statedBackend sets the backend of the plugin entry and of the reconciler.
const statedBackend = `configMapGenerator:
- name: ip-masq
  namespace: kube-system
  behavior: merge
  literals:
  - 'entry.json={"type": "ip-masq", "backend": %[1]q}'
patches:
- target: {kind: DaemonSet}
  patch: |
    - op: test
      path: /spec/template/spec/containers/0/env/0/name
      value: BACKEND
    - op: replace
      path: /spec/template/spec/containers/0/env/0/value
      value: %[1]s
`

// TestVerdicts rolls out each backend of ip-masq with each mode of kube-proxy and removes it again:
// first the DaemonSet, after which the verdicts stay, and then everything.
func TestVerdicts(t *testing.T) {
	for _, proxy := range []string{"iptables", "nftables"} {
		t.Run("proxy="+proxy, func(t *testing.T) {
			c := newCluster(t, cluster.Options{ProxyMode: proxy})
			before := traces(t, c)
			k := newWorkload(t, c)
			// These pods run before the rollout; they show that wrong verdicts are detected.
			startAndStop(t, c, k.alone)

			// auto is the backend of kube-proxy.
			backends := []struct{ stated, install, uninstall, want string }{
				{"nftables", "base", "uninstall", "nftables"},
				{"auto", "overlays/iptables", "overlays/uninstall-iptables", proxy},
			}
			if proxy == "nftables" {
				backends = append(backends, backends[1])
				backends[2].stated, backends[2].want = "iptables", "iptables"
			}
			for _, b := range backends {
				t.Run("backend="+b.stated, func(t *testing.T) {
					if b.stated == "iptables" {
						must(t, c.ApplyOverlay(t.Context(), fmt.Sprintf(statedBackend, b.stated), b.install))
						awaitRollout(t, c, "ip-masq")
					} else {
						rollOut(t, c, b.install, "ip-masq")
					}
					expectBackend(t, c, b.want)
					k.expectVerdicts(t)
					startAndStop(t, c, k.masqueraded)

					takeDown(t, c, b.install)
					k.expectVerdicts(t)
					startAndStop(t, c, k.masqueraded)

					rollOut(t, c, b.uninstall, "ip-masq-uninstall")
					expectNoTrace(t, c, before)
					takeDown(t, c, b.uninstall)
					startAndStop(t, c, k.alone)
					expectNoTrace(t, c, before)
				})
			}
		})
	}
}

// outside returns a flow to the outside host and the source it must have there.
func outside(k *workload, source netip.Addr) []want {
	return []want{{k.World.Outside.Addrs[0], topology.EchoPort, "outside", source}}
}

// expectBackend fails the test unless the rules of every node are in this backend only.
func expectBackend(t *testing.T, c *cluster.Cluster, backend string) {
	t.Helper()
	for _, n := range c.Nodes {
		nft := topology.Must(n.Output(t.Context(), "nft", "list", "tables"))(t)
		iptables := topology.Must(n.Output(t.Context(), "iptables-save", "-t", "nat"))(t)
		found := map[string]bool{
			"nftables": strings.Contains(nft, "table ip ip-masq\n"),
			"iptables": strings.Contains(iptables, "-A POSTROUTING") && strings.Contains(iptables, "-j IP-MASQ-AGENT"),
		}
		if want := map[string]bool{"nftables": backend == "nftables", "iptables": backend == "iptables"}; !cmp.Equal(found, want) {
			t.Errorf("%s has rules in %v, want them in %s:\n%s%s", n.Name, found, backend, nft, iptables)
		}
	}
}

// traces returns the files, tables and chains of each node that belong to this project.
func traces(t *testing.T, c *cluster.Cluster) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	for _, n := range c.Nodes {
		found[n.Name] = topology.Must(nodeTraces(t.Context(), n))(t)
	}
	return found
}

func nodeTraces(ctx context.Context, n *cluster.Node) ([]string, error) {
	var found []string
	for _, directory := range []string{"/etc/cni/net.d", "/opt/cni/bin", "/var/lib/cni"} {
		names, err := os.ReadDir(n.Path(directory))
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			// Files of host-local and libcni.
			if p := filepath.Join(directory, name.Name()); p != "/var/lib/cni/networks" && p != "/var/lib/cni/results" {
				found = append(found, p)
			}
		}
	}
	conflist, err := os.ReadFile(n.Path(cluster.ConflistPath))
	if err != nil {
		return nil, err
	}
	found = append(found, string(conflist))
	rules, err := n.Output(ctx, "nft", "list", "ruleset")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(rules) {
		if folded := strings.ToLower(line); strings.Contains(folded, "ip-masq") || strings.Contains(folded, "masq-ip") {
			found = append(found, line)
		}
	}
	legacy, err := n.Output(ctx, "cat", "/proc/net/ip_tables_names")
	if err == nil && legacy != "" {
		found = append(found, "legacy tables: "+legacy)
	}
	return found, nil
}

// expectNoTrace fails the test if a node has more of them than before.
func expectNoTrace(t *testing.T, c *cluster.Cluster, before map[string][]string) {
	t.Helper()
	if diff := cmp.Diff(before, traces(t, c)); diff != "" {
		t.Errorf("traces remain (-before +after):\n%s", diff)
	}
}
