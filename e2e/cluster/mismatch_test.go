// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
)

// statedBackend sets the backend of the plugin entry and of the reconciler.
const statedBackend = `configMapGenerator:
- name: ip-masq
  namespace: kube-system
  behavior: merge
  literals:
  - 'entry.json={"type": "ip-masq"%s}'
patches:
- target: {kind: DaemonSet}
  patch: |
    - op: test
      path: /spec/template/spec/containers/0/env/0/name
      value: BACKEND
    - op: replace
      path: /spec/template/spec/containers/0/env/0/value
      value: %s
`

// TestMismatch runs images with iptables on hosts without it, and the reverse. It checks that pods
// start with the right verdicts whether the reconciler or, after a boot, the plugin chose the
// backend.
func TestMismatch(t *testing.T) {
	ctx := t.Context()
	t.Run("host without", func(t *testing.T) {
		c := newCluster(t, cluster.Options{ProxyMode: "nftables"})
		k := newWorkload(t, c)
		before := traces(t, c)
		const programs = "/usr/sbin/xtables-nft-multi /usr/sbin/xtables-legacy-multi"
		onNodes(t, c, "for p in "+programs+"; do mount --bind /dev/null $p; done")
		rollOut(t, c, "overlays/iptables", "ip-masq")
		startAndStop(t, c, k.masqueraded)
		k.expectVerdicts(t)

		takeDown(t, c, "overlays/iptables")
		forgetBoot(t, c)
		startAndStop(t, c, k.masqueraded)
		rollOut(t, c, "overlays/iptables", "ip-masq")
		k.expectVerdicts(t)

		takeDown(t, c, "overlays/iptables")
		rollOut(t, c, "overlays/uninstall-iptables", "ip-masq-uninstall")
		takeDown(t, c, "overlays/uninstall-iptables")
		onNodes(t, c, "umount "+programs)
		expectNoTrace(t, c, before)
	})
	t.Run("image without", func(t *testing.T) {
		c := newCluster(t, cluster.Options{ProxyMode: "iptables"})
		k := newWorkload(t, c)
		autoEntry := fmt.Sprintf(statedBackend, "", "auto")
		must(t, c.ApplyOverlay(ctx, autoEntry, "base"))
		awaitRollout(t, c, "ip-masq")
		startAndStop(t, c, k.masqueraded)
		k.expectVerdicts(t)

		takeDown(t, c, "base")
		expectBackend(t, c, "nftables")
		forgetBoot(t, c)
		startAndStop(t, c, k.masqueraded)
		expectBackend(t, c, "iptables")
		must(t, c.ApplyOverlay(ctx, autoEntry, "base"))
		awaitReconcilers(t, c)
		expectBackend(t, c, "iptables")
		// The reconciler can read these rules but not write them.
		onNodes(t, c, "iptables -t nat -F IP-MASQ-AGENT")
		for _, n := range c.Nodes {
			must(t, cluster.Await(ctx, cluster.Patience, func() error {
				status, text, err := n.Readyz(ctx)
				if err == nil && (status != http.StatusServiceUnavailable || !containsAll(text, "iptables")) {
					err = fmt.Errorf("/readyz of %s: %d %s; want the lack of iptables to be named", n.Name, status, text)
				}
				return err
			}))
			_, text, err := n.Readyz(ctx)
			t.Log(n.Name, text, err)
		}
		startAndStop(t, c, k.masqueraded)
		k.expectVerdicts(t)
	})
}

// awaitReconcilers waits until a reconciler runs on every node, ready or not.
func awaitReconcilers(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	for _, n := range c.Nodes {
		must(t, cluster.Await(t.Context(), cluster.Patience, func() error {
			_, _, err := n.Readyz(t.Context())
			return err
		}))
	}
}

// onNodes runs a script on every node.
func onNodes(t *testing.T, c *cluster.Cluster, script string) {
	t.Helper()
	for _, n := range c.Nodes {
		must(t, n.Run(t.Context(), "sh", "-ec", script))
	}
}

// forgetBoot changes the boot ID in every node's record and removes the rules, which are in nftables.
func forgetBoot(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	onNodes(t, c, `record=/var/lib/cni/ip-masq/record.json
		sed -i 's/"boot":"[^"]*"/"boot":"00000000-0000-4000-8000-000000000000"/' $record
		grep -q 00000000-0000-4000-8000 $record
		nft "add table ip ip-masq; delete table ip ip-masq"`)
}
