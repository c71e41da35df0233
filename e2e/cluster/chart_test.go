// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/documents"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// TestChart installs, tests, upgrades, rolls back and uninstalls the chart by the commands of the
// documents, and changes the policy in its values. Every packet of continuous senders is checked
// meanwhile.
func TestChart(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, cluster.Options{ProxyMode: "nftables"})
	before := traces(t, c)
	k := newWorkload(t, c)
	startAndStop(t, c, k.alone)
	u := newUser(t, c)

	u.run(t, "install.md", "helm install ")
	output := u.run(t, "install.md", "helm test ")
	if !containsAll(output, "Phase:          Succeeded", "\nNode:        ready", "\n10.1.2.3: exempt") {
		t.Errorf("helm test and status print:\n%s", output)
	}
	expectBackend(t, c, "nftables")
	k.expectVerdicts(t)
	startAndStop(t, c, k.masqueraded)

	s := &streams{Cluster: c, recorder: c.Record(t), began: time.Now(), to: []netip.Addr{c.World.LAN.Addrs[0], c.World.Outside.Addrs[0]}}
	for _, n := range c.Nodes {
		must(t, c.Start(ctx, s.pod("stream-"+n.Name, n)))
		s.awaitFrom(t, n.Pods, s.began)
	}

	// The agents' ConfigMap exempts one half of a prefix, and the plugin entry the other.
	agents, entry := netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("198.51.100.200")
	u.write(t, "values.yaml", `policy:
  guard: drop
  nonMasqueradeCIDRs: [10.0.0.0/8, 192.168.0.0/16, 198.51.100.128/25]
agentConfig:
  config:
    nonMasqueradeCIDRs: [198.51.100.0/25]
`)
	chart := strings.ReplaceAll(u.read(t, "deploy/chart/Chart.yaml"), strings.TrimPrefix(release, "v"), strings.TrimPrefix(nextRelease, "v"))
	u.write(t, "deploy/chart/Chart.yaml", chart)
	plugins := s.plugins(t)
	s.upgrade(t, func() {
		output = u.run(t, "operate.md", "helm upgrade ip-masq deploy/chart --namespace kube-system --values")
	})
	awaitEntries(t, c, `{"backend":"nftables","guard":"drop","nonMasqueradeCIDRs":["10.0.0.0/8","192.168.0.0/16","198.51.100.128/25"],"type":"ip-masq"}`)
	expectHalves := func(seen func(*cluster.Node, netip.Addr) netip.Addr) {
		t.Helper()
		startAndStop(t, c, func(n *cluster.Node, pod netip.Addr) []want {
			return []want{{agents, topology.EchoPort, "outside", pod}, {entry, topology.EchoPort, "outside", seen(n, pod)}}
		})
	}
	expectHalves(func(_ *cluster.Node, pod netip.Addr) netip.Addr { return pod })

	// Another policy alone replaces no pod.
	s.exempt, s.to = netip.PrefixFrom(agents, 32), append(s.to, agents)
	for _, n := range c.Nodes {
		must(t, c.Start(ctx, cluster.Pod{Name: "exempt-" + n.Name, Node: n, Args: cluster.Streaming(agents)}))
	}
	pods := reconcilerPods(t, c)
	u.shell(t, strings.Replace(documented(t, "operate.md", "--set 'policy.nonMasqueradeCIDRs="), "10.0.0.0/8,", "10.0.0.0/8,192.168.0.0/16,", 1))
	awaitEntries(t, c, `{"backend":"nftables","guard":"drop","nonMasqueradeCIDRs":["10.0.0.0/8","192.168.0.0/16","192.0.2.0/24"],"type":"ip-masq"}`)
	expectHalves(func(n *cluster.Node, _ netip.Addr) netip.Addr { return n.Address })
	assert.Equal(t, "pods after the change of the policy", reconcilerPods(t, c), pods)

	replaced := time.Now()
	for _, n := range c.Nodes {
		s.awaitFrom(t, n.Pods, replaced)
	}
	s.expectRight(t)
	t.Logf("%d packets, each from the right address", len(s.recorder.Since(s.began)))

	// The first revision has the older release and no ConfigMap.
	for _, n := range c.Nodes {
		must(t, c.Delete(ctx, "exempt-"+n.Name))
	}
	s.began = time.Now()
	u.run(t, "operate.md", "helm rollback ip-masq 1")
	awaitRollout(t, c, "ip-masq")
	awaitEntries(t, c, `{"backend":"nftables","guard":"count","nonMasqueradeCIDRs":["10.0.0.0/8","192.168.0.0/16"],"type":"ip-masq"}`)
	startAndStop(t, c, func(n *cluster.Node, _ netip.Addr) []want {
		return []want{{agents, topology.EchoPort, "outside", n.Address}, {entry, topology.EchoPort, "outside", n.Address}}
	})
	if !slices.EqualFunc(s.plugins(t), plugins, bytes.Equal) {
		t.Error("the rollback did not restore the plugin")
	}
	for _, n := range c.Nodes {
		must(t, c.Delete(ctx, "stream-"+n.Name))
	}
	s.expectRight(t)

	u.run(t, "install.md", "helm uninstall ip-masq ")
	expectNoTrace(t, c, before)
	startAndStop(t, c, k.alone)
	expectNoTrace(t, c, before)
	must(t, cluster.Await(ctx, cluster.Patience, func() error {
		left, err := c.Kubectl(ctx, "get", "daemonsets,configmaps,pods,secrets", "-n", "kube-system", "-o", "name")
		if err == nil && strings.Contains(left, "ip-masq") {
			err = fmt.Errorf("helm uninstall left\n%s", left)
		}
		return err
	}))

	// A kustomization is replaced by the chart.
	rollOut(t, c, "base", "ip-masq")
	u.run(t, "../deploy/README.md", "--cascade=orphan")
	startAndStop(t, c, k.masqueraded)
}

// reconcilerPods returns the names of the DaemonSet's pods with their restarts.
func reconcilerPods(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	return assert.Must(c.Kubectl(t.Context(), "get", "pods", "-n", "kube-system", "-l", "app.kubernetes.io/name=ip-masq", "--sort-by=.metadata.name",
		"-o", "jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[*].restartCount};{end}"))(t)
}

// awaitEntries waits until the conflist of each node has this plugin entry, and the rules had time to follow: kubelet
// updates the mount of a ConfigMap within two minutes.
func awaitEntries(t *testing.T, c *cluster.Cluster, entry string) {
	t.Helper()
	must(t, cluster.Await(t.Context(), 3*time.Minute, func() error {
		for i, now := range pluginEntries(t, c) {
			if now != entry {
				return fmt.Errorf("node %d has the plugin entry %s, want %s", i+1, now, entry)
			}
		}
		return nil
	}))
	time.Sleep(2 * time.Second)
}

// user is an administrator in a directory that has the files of a release.
type user struct {
	*cluster.Cluster
	directory string
}

func newUser(t *testing.T, c *cluster.Cluster) *user {
	t.Helper()
	u := &user{c, t.TempDir()}
	for _, part := range []string{"deploy/chart", "deploy/kustomize"} {
		must(t, os.CopyFS(filepath.Join(u.directory, part), os.DirFS(filepath.Join("../..", part))))
	}
	return u
}

func (u *user) read(t *testing.T, path string) string {
	t.Helper()
	return string(assert.Must(os.ReadFile(filepath.Join(u.directory, path)))(t))
}

func (u *user) write(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(filepath.Join(u.directory, path)), 0o700))
	must(t, os.WriteFile(filepath.Join(u.directory, path), []byte(text), 0o600))
}

// run runs the commands that a document of docs has, and returns their output.
func (u *user) run(t *testing.T, document, part string) string {
	t.Helper()
	return u.shell(t, documented(t, document, part))
}

func (u *user) shell(t *testing.T, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*cluster.Patience)
	defer cancel()
	began := time.Now()
	output, err := u.Shell(ctx, u.directory, script)
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, output, u.Logs(t.Context(), "ip-masq"))
	}
	t.Logf("%.1fs:\n%s%s", time.Since(began).Seconds(), script, output)
	return output
}

// documented returns the block of commands in a document of docs that contains the part.
func documented(t *testing.T, document, part string) string {
	t.Helper()
	text := assert.Must(os.ReadFile(filepath.Join("../../docs", document)))(t)
	var found []string
	for _, b := range documents.Blocks(string(text)) {
		if strings.Contains(b.Commands, part) {
			found = append(found, b.Commands)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%s has %d blocks with %q: %q", document, len(found), part, found)
	}
	return found[0]
}

// pluginEntries returns the plugin entry in the conflist of each node.
func pluginEntries(t *testing.T, c *cluster.Cluster) []string {
	t.Helper()
	var entries []string
	for _, n := range c.Nodes {
		var list struct{ Plugins []map[string]any }
		must(t, json.Unmarshal(assert.Must(os.ReadFile(n.Path(cluster.ConflistPath)))(t), &list))
		entry := list.Plugins[len(list.Plugins)-1]
		entries = append(entries, string(assert.Must(json.Marshal(entry))(t)))
	}
	return entries
}
