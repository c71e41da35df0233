// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// startupTaint is the taint with which nodes register and that components/startup-taint removes.
const startupTaint = "ip-masq.github.io/not-ready"

// TestStartupTaint registers nodes with the taint. It checks that no pod starts there before the
// reconciler is ready, and that pods start then.
func TestStartupTaint(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, cluster.Options{
		ProxyMode: "nftables",
		Taints:    []cluster.Taint{{Key: startupTaint, Effect: "NoSchedule"}},
	})
	must(t, c.ImportKubectl(ctx))
	k := &workload{Cluster: c}
	n := c.Nodes[0]
	must(t, c.Create(ctx, cluster.Pod{Name: "patient", Node: n}))
	must(t, cluster.Await(ctx, cluster.Patience, func() error {
		if events := c.Events(ctx, "patient"); !containsAll(events, "FailedScheduling") {
			return fmt.Errorf("the pod is not refused: %s", events)
		}
		return nil
	}))
	must(t, c.ApplyOverlay(ctx, fmt.Sprintf("images: [{name: kubectl, newName: %s, newTag: %q}]\n", cluster.KubectlImage, "1"), "overlays/startup-taint"))
	awaitRollout(t, c, "ip-masq")
	if _, err := c.AwaitRunning(ctx, "patient"); err != nil {
		t.Fatalf("%v\n%s", err, topology.Must(c.Kubectl(ctx, "logs", "-n", "kube-system", "deployment/ip-masq-untaint"))(t))
	}
	expect(t, "patient", c.FromPod("patient"), outside(k, n.Address)...)
	for _, n := range c.Nodes {
		var node struct {
			Spec struct{ Taints []cluster.Taint }
		}
		must(t, cluster.Await(ctx, cluster.Patience, func() error {
			if err := c.Get(ctx, &node, "node", n.Name); err != nil {
				return err
			}
			if len(node.Spec.Taints) > 0 {
				return fmt.Errorf("%s has taints %v", n.Name, node.Spec.Taints)
			}
			return nil
		}))
	}
	// A user with the token of the Deployment can set no empty field of a node.
	for _, spec := range []string{`{"providerID": "other"}`, `{"podCIDR": "192.0.2.0/24", "podCIDRs": ["192.0.2.0/24"]}`, `{"unschedulable": true}`} {
		out, err := c.Kubectl(ctx, "patch", "node", n.Name, "--dry-run=server", "--as=system:serviceaccount:kube-system:ip-masq-untaint",
			"--type=merge", "--patch", `{"spec": `+spec+`}`)
		if said := fmt.Sprint(out, err); err == nil || !strings.Contains(said, "changes nothing else of the node") {
			t.Errorf("patch %s: %s", spec, said)
		}
	}
}
