// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster && e2e_readiness

package cluster_test

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
)

const (
	readyCondition   = "ip-masq.github.io/Ready"
	problemCondition = "ip-masq.github.io/NotReady"
	readinessTaint   = "readiness.k8s.io/ip-masq"
)

// programs returns the directory that tools/node-readiness filled.
func programs() string { return os.Getenv("IPMASQ_READINESS_DIR") }

// awaitCondition waits for a condition of a node with a message that contains the text.
func awaitCondition(t *testing.T, n *cluster.Node, kind, status, text string) {
	t.Helper()
	must(t, cluster.Await(t.Context(), cluster.Patience, func() error {
		got, message, err := n.Condition(t.Context(), kind)
		if err == nil && (got != status || !strings.Contains(message, text)) {
			err = fmt.Errorf("%s: condition %s is %q, %q, want %s, %q", n.Name, kind, got, message, status, text)
		}
		return err
	}))
}

// awaitTaint waits until a node has the taint, or does not.
func awaitTaint(t *testing.T, c *cluster.Cluster, n *cluster.Node, tainted bool) {
	t.Helper()
	must(t, cluster.Await(t.Context(), cluster.Patience, func() error {
		var node struct {
			Spec struct{ Taints []cluster.Taint }
		}
		err := c.Get(t.Context(), &node, "node", n.Name)
		if has := strings.Contains(fmt.Sprint(node.Spec.Taints), readinessTaint); err == nil && has != tainted {
			err = fmt.Errorf("%s has taints %v", n.Name, node.Spec.Taints)
		}
		return err
	}))
}

// breakEntry writes a mistake into the plugin entry of a node, and returns a function that mends it.
func breakEntry(t *testing.T, n *cluster.Node) (mend func()) {
	t.Helper()
	path := n.Path(cluster.ConflistPath)
	text := assert.Must(os.ReadFile(path))(t)
	broken := regexp.MustCompile(`("guard": ?)"count"`).ReplaceAllString(string(text), `$1"counts"`)
	if broken == string(text) {
		t.Fatalf("no guard in %s", text)
	}
	must(t, n.WriteFile(cluster.ConflistPath, broken, 0o644))
	return func() { must(t, n.WriteFile(cluster.ConflistPath, string(text), 0o644)) }
}

// TestNodeReadiness registers nodes with the taint and installs the chart with nodeReadiness, beside the real controller.
// No pod starts before the reconciler is ready, and a node whose entry breaks gets the taint again.
func TestNodeReadiness(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, cluster.Options{ProxyMode: "nftables", Taints: []cluster.Taint{{Key: readinessTaint, Effect: "NoSchedule"}}})
	c.StartReadinessController(t, programs())
	k := &workload{Cluster: c}
	n := c.Nodes[0]
	must(t, c.Create(ctx, cluster.Pod{Name: "patient", Node: n}))
	must(t, cluster.Await(ctx, cluster.Patience, func() error {
		if events := c.Events(ctx, "patient"); !containsAll(events, "FailedScheduling") {
			return fmt.Errorf("the pod is not refused: %s", events)
		}
		return nil
	}))
	u := newUser(t, c)
	u.write(t, "values.yaml", "nodeReadiness: {enabled: true, interval: 1s, constrainedImpersonation: true}\n")
	u.shell(t, "helm install ip-masq deploy/chart --namespace kube-system --values values.yaml")
	awaitRollout(t, c, "ip-masq")
	awaitRollout(t, c, "ip-masq-readiness")
	for _, n := range c.Nodes {
		awaitCondition(t, n, readyCondition, "True", "")
		awaitTaint(t, c, n, false)
	}
	if _, err := c.AwaitRunning(ctx, "patient"); err != nil {
		t.Fatalf("%v\n%s", err, c.Logs(ctx, "ip-masq-readiness"))
	}
	expect(t, "patient", c.FromPod("patient"), outside(k, n.Address)...)

	mend := breakEntry(t, n)
	awaitCondition(t, n, readyCondition, "False", "source: ")
	awaitTaint(t, c, n, true)
	awaitTaint(t, c, c.Nodes[1], false)
	mend()
	awaitCondition(t, n, readyCondition, "True", "")
	awaitTaint(t, c, n, false)

	// Without the token of a pod on a node, the service account has no right.
	out, err := c.Kubectl(ctx, "auth", "can-i", "update", "nodes", "--subresource=status", "--as=system:serviceaccount:kube-system:ip-masq-readiness")
	if err == nil || !strings.HasPrefix(out, "no") {
		t.Errorf("the reporter can write every node: %v %s", err, out)
	}
	u.shell(t, "helm upgrade ip-masq deploy/chart --namespace kube-system --reset-then-reuse-values --set uninstall.enabled=true")
	must(t, cluster.Await(ctx, cluster.Patience, func() error {
		left, err := c.Kubectl(ctx, "get", "nodereadinessrules", "-o", "name")
		if err == nil && left != "" {
			err = fmt.Errorf("left %s", left)
		}
		return err
	}))
}

// TestNodeProblemDetector reads the three states of the condition from the real node-problem-detector.
func TestNodeProblemDetector(t *testing.T) {
	c := newCluster(t, cluster.Options{ProxyMode: "nftables"})
	n := c.Nodes[0]
	n.StartProblemDetector(t, programs())
	awaitCondition(t, n, problemCondition, "Unknown", "does not answer")
	rollOut(t, c, "base", "ip-masq")
	awaitCondition(t, n, problemCondition, "False", "status 200")
	mend := breakEntry(t, n)
	awaitCondition(t, n, problemCondition, "True", "source: ")
	mend()
	awaitCondition(t, n, problemCondition, "False", "status 200")
	takeDown(t, c, "base")
	awaitCondition(t, n, problemCondition, "Unknown", "does not answer")
}
