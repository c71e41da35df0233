// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

// release is the tag in the manifests.
const release = "v0.1.0"

// newCluster makes a cluster whose nodes have both variants of the project's image.
func newCluster(t *testing.T, options cluster.Options) *cluster.Cluster {
	t.Helper()
	began := time.Now()
	options.Binaries = cluster.FindBinaries(t)
	c := cluster.New(t, options)
	for _, tag := range []string{release, release + "-iptables"} {
		c.ImportProject(t, tag)
	}
	t.Logf("the cluster is ready after %.1fs", time.Since(began).Seconds())
	return c
}

// rollOut applies a directory of deploy/kustomize and waits until its DaemonSet is ready on every
// node.
func rollOut(t *testing.T, c *cluster.Cluster, directory, daemonSet string) {
	t.Helper()
	must(t, c.ApplyDirectory(t.Context(), directory))
	awaitRollout(t, c, daemonSet)
}

// awaitRollout waits until a DaemonSet is ready on every node.
func awaitRollout(t *testing.T, c *cluster.Cluster, daemonSet string) {
	t.Helper()
	if err := c.AwaitRollout(t.Context(), daemonSet); err != nil {
		t.Fatalf("%v\n%s", err, c.Logs(t.Context(), daemonSet))
	}
}

// takeDown deletes the objects of a directory and waits until its pods have ended.
func takeDown(t *testing.T, c *cluster.Cluster, directory string) {
	t.Helper()
	must(t, c.DeleteDirectory(t.Context(), directory))
}

// startAndStop starts a pod on each node, checks its verdicts, and deletes it.
func startAndStop(t *testing.T, c *cluster.Cluster, wants func(n *cluster.Node, pod netip.Addr) []want) {
	t.Helper()
	ctx := t.Context()
	var pods []cluster.Pod
	var names []string
	for _, n := range c.Nodes {
		p := cluster.Pod{Name: "passing-" + n.Name, Node: n}
		pods, names = append(pods, p), append(names, p.Name)
	}
	must(t, c.Create(ctx, pods...))
	for _, p := range pods {
		address := assert.Must(c.AwaitRunning(ctx, p.Name))(t)
		expect(t, p.Name, c.FromPod(p.Name), wants(p.Node, address)...)
	}
	must(t, c.Delete(ctx, names...))
}

// awaitReadyz waits until the reconciler on a node is ready.
func awaitReadyz(t *testing.T, n *cluster.Node) {
	t.Helper()
	must(t, cluster.Await(t.Context(), cluster.Patience, func() error {
		status, text, err := n.Readyz(t.Context())
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("/readyz of %s: %d %s", n.Name, status, text)
		}
		return err
	}))
}

var must = assert.NoError

func containsAll(text string, parts ...string) bool {
	for _, part := range parts {
		if !strings.Contains(text, part) {
			return false
		}
	}
	return true
}

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }
