// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// TestCapabilities checks the capabilities of the DaemonSet and that it needs each of them.
func TestCapabilities(t *testing.T) {
	t.Run("nftables", func(t *testing.T) {
		c := newCluster(t, cluster.Options{ProxyMode: "nftables"})
		testManifests(t, c)
		testCapabilities(t, c, "base", "", "uninstall", map[string]uint{"NET_ADMIN": unix.CAP_NET_ADMIN})
	})
	t.Run("iptables-legacy", func(t *testing.T) {
		c := newCluster(t, cluster.Options{ProxyMode: "iptables", LegacyIPTables: true})
		// With backend auto the reconciler would use nftables if it cannot use iptables.
		testCapabilities(t, c, "overlays/iptables", iptablesEntry, "overlays/uninstall-iptables",
			map[string]uint{"NET_ADMIN": unix.CAP_NET_ADMIN, "NET_RAW": unix.CAP_NET_RAW})
	})
}

// testCapabilities rolls out a directory with the rest of an overlay and checks that the reconciler
// has exactly these capabilities. Then it removes each one in turn and checks that the reconciler
// does not become ready and reports the reason.
func testCapabilities(t *testing.T, c *cluster.Cluster, directory, rest, uninstall string, capabilities map[string]uint) {
	ctx := t.Context()
	must(t, c.ApplyOverlay(ctx, rest, directory))
	awaitRollout(t, c, "ip-masq")
	var set uint64
	for _, bit := range capabilities {
		set |= 1 << bit
	}
	for _, n := range c.Nodes {
		for kind, has := range capabilitySets(t, n) {
			if kind != "CapInh" && kind != "CapAmb" && has != set {
				t.Errorf("%s of the reconciler on %s is %#x, want %#x", kind, n.Name, has, set)
			}
		}
	}
	takeDown(t, c, directory)
	rollOut(t, c, uninstall, "ip-masq-uninstall")
	takeDown(t, c, uninstall)

	for lacking := range capabilities {
		t.Run("without "+lacking, func(t *testing.T) {
			var others []string
			for name := range capabilities {
				if name != lacking {
					others = append(others, name)
				}
			}
			must(t, c.ApplyOverlay(ctx, rest+fmt.Sprintf(`patches:
- target: {kind: DaemonSet}
  patch: |
    - op: replace
      path: /spec/template/spec/containers/0/securityContext/capabilities/add
      value: [%s]
`, strings.Join(others, ", ")), directory))
			for _, n := range c.Nodes {
				must(t, cluster.Await(ctx, cluster.Patience, func() error {
					status, text, err := n.Readyz(ctx)
					if err == nil && (status == 200 || !strings.Contains(text, "CAP_"+lacking)) {
						err = fmt.Errorf("/readyz of %s: %d %s; want CAP_%s to be missing", n.Name, status, text, lacking)
					}
					return err
				}))
			}
			takeDown(t, c, directory)
			rollOut(t, c, uninstall, "ip-masq-uninstall")
			takeDown(t, c, uninstall)
		})
	}
}

// capabilitySets returns the capability sets of the reconciler on a node: CapEff and so on.
func capabilitySets(t *testing.T, n *cluster.Node) map[string]uint64 {
	t.Helper()
	processes := topology.Must(filepath.Glob(n.Path("/proc/[0-9]*/status")))(t)
	for _, path := range processes {
		status, err := os.ReadFile(path)
		if err != nil || !strings.HasPrefix(string(status), "Name:\tip-masq-reconci\n") {
			continue // the process has ended, or is another one
		}
		sets := map[string]uint64{}
		for line := range strings.Lines(string(status)) {
			if kind, value, _ := strings.Cut(line, ":"); strings.HasPrefix(kind, "Cap") {
				sets[kind] = topology.Must(strconv.ParseUint(strings.TrimSpace(value), 16, 64))(t)
			}
		}
		return sets
	}
	t.Fatalf("no reconciler runs on %s", n.Name)
	return nil
}
