// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
)

// autoEntry leaves the choice of a backend to the node, with the image that has
// nftables alone.
const autoEntry = `configMapGenerator:
- name: ip-masq
  namespace: kube-system
  behavior: merge
  literals:
  - 'entry.json={"type": "ip-masq"}'
patches:
- target: {kind: DaemonSet}
  patch: |
    - op: test
      path: /spec/template/spec/containers/0/env/0/name
      value: BACKEND
    - op: replace
      path: /spec/template/spec/containers/0/env/0/value
      value: auto
`

// TestMismatch has images with iptables on hosts without, and the reverse. Pods
// start and verdicts are right, whether the plugin or the reconciler chose the backend: the reconciler, because
// it was first, or the plugin, because it was the first after a boot.
func TestMismatch(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, cluster.Options{ProxyMode: "nftables"})
	k := newWorkload(t, c)
	before := traces(t, c)
	t.Run("host without", func(t *testing.T) {
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
		must(t, c.ApplyOverlay(ctx, autoEntry, "base"))
		awaitRollout(t, c, "ip-masq")
		startAndStop(t, c, k.masqueraded)
		k.expectVerdicts(t)

		takeDown(t, c, "base")
		forgetBoot(t, c)
		startAndStop(t, c, k.masqueraded)
		expectBackend(t, c, "iptables")
		must(t, c.ApplyOverlay(ctx, autoEntry, "base"))
		awaitReconcilers(t, c)
		expectBackend(t, c, "iptables")
		// It can read these rules, and not write them.
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

// awaitReconcilers waits until one runs on every node, whatever it says.
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

// forgetBoot makes what every node has on record that of an earlier boot, and takes
// the rules away.
func forgetBoot(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	onNodes(t, c, `record=/var/lib/cni/ip-masq/record.json
		sed -i 's/"boot":"[^"]*"/"boot":"00000000-0000-4000-8000-000000000000"/' $record
		grep -q 00000000-0000-4000-8000 $record
		for table in nat ip-masq; do nft "add table ip $table; delete table ip $table"; done`)
}
