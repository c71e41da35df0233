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
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// NodePorts of the services.
const (
	nearPort  = 30081
	farPort   = 30082
	localPort = 30083 // service far with externalTrafficPolicy Local
)

// workload has the pods and services of most tests: a client and a server on the first node, a
// server on the second, and a pod with host network on each.
type workload struct {
	*cluster.Cluster
	client, near, far netip.Addr
	nearIP, farIP     netip.Addr // of services
}

// newWorkload creates the workload.
func newWorkload(t *testing.T, c *cluster.Cluster) *workload {
	t.Helper()
	ctx := t.Context()
	first, second := c.Nodes[0], c.Nodes[1]
	must(t, c.Start(ctx,
		cluster.Pod{Name: "client", Node: first, Restart: true},
		cluster.Pod{Name: "near", Node: first, Restart: true, Args: cluster.Serving("near")},
		cluster.Pod{Name: "far", Node: second, Restart: true, Args: cluster.Serving("far")},
		cluster.Pod{Name: "host1", Node: first, Restart: true, HostNetwork: true, Args: cluster.Serving("host1")},
		cluster.Pod{Name: "host2", Node: second, Restart: true, HostNetwork: true, Args: cluster.Serving("host2")}))
	k := &workload{Cluster: c}
	for name, address := range map[string]*netip.Addr{"client": &k.client, "near": &k.near, "far": &k.far} {
		*address = assert.Must(c.AwaitRunning(ctx, name))(t)
	}
	k.nearIP = c.Expose(t, "near", "near", "Cluster", nearPort)
	k.farIP = c.Expose(t, "far", "far", "Cluster", farPort)
	c.Expose(t, "far-local", "far", "Local", localPort)
	return k
}

// want is a flow and its expected result.
type want struct {
	to     netip.Addr
	port   uint16
	by     string
	source netip.Addr
}

// verdicts returns the expected results by the sender's name.
func (k *workload) verdicts() map[string][]want {
	const port = cluster.PeerPort
	first, second := k.Nodes[0].Address, k.Nodes[1].Address
	// The address of a node towards its own pods.
	gateway1, gateway2 := k.Nodes[0].Pods.Addr().Next(), k.Nodes[1].Pods.Addr().Next()
	lan, outside := k.World.LAN.Addrs[0], k.World.Outside.Addrs[0]
	lan10, outside198 := netip.MustParseAddr("10.77.7.7"), netip.MustParseAddr("198.51.100.7")
	return map[string][]want{
		"client": {
			{k.near, port, "near", k.client},
			{k.far, port, "far", k.client},
			{first, port, "host1", k.client},
			{second, port, "host2", k.client},
			{lan, topology.EchoPort, "lan", k.client},
			{lan10, topology.EchoPort, "lan", k.client},
			{outside, topology.EchoPort, "outside", first},
			{outside198, topology.EchoPort, "outside", first},
			{k.nearIP, port, "near", k.client},
			{k.farIP, port, "far", k.client},
			// kube-proxy masquerades traffic to a NodePort.
			{first, farPort, "far", first},
			{second, farPort, "far", gateway2},
			{second, localPort, "far", k.client},
		},
		"host1": {
			{k.near, port, "near", gateway1},
			{k.far, port, "far", first},
			{second, port, "host2", first},
			{lan, topology.EchoPort, "lan", first},
			{outside198, topology.EchoPort, "outside", first},
			{k.nearIP, port, "near", gateway1},
			{k.farIP, port, "far", first},
			{second, localPort, "far", first},
		},
		"lan": {
			{k.near, port, "near", lan},
			{first, nearPort, "near", gateway1},
			{first, farPort, "far", first},
			{second, localPort, "far", lan},
		},
		"outside": {
			{first, nearPort, "near", gateway1},
			{first, farPort, "far", first},
			{second, localPort, "far", outside},
		},
	}
}

// masqueraded returns the expected result of a pod with the project's rules, and alone without
// them.
func (k *workload) masqueraded(n *cluster.Node, _ netip.Addr) []want { return outside(k, n.Address) }

func (k *workload) alone(_ *cluster.Node, pod netip.Addr) []want { return outside(k, pod) }

// expectVerdicts fails the test if a receiver sees a wrong source address.
func (k *workload) expectVerdicts(t *testing.T) {
	t.Helper()
	for name, wants := range k.verdicts() {
		var sender cluster.Sender
		switch name {
		case "lan":
			sender = k.FromHost(k.World.LAN)
		case "outside":
			sender = k.FromHost(k.World.Outside)
		default:
			sender = k.FromPod(name)
		}
		expect(t, name, sender, wants...)
	}
}

// expect sends the flows with UDP and TCP and fails the test if the results differ. It retries
// because kube-proxy may be late.
func expect(t *testing.T, name string, sender cluster.Sender, wants ...want) {
	t.Helper()
	var flows []cluster.Flow
	wanted := map[cluster.Flow]cluster.Seen{}
	for _, w := range wants {
		for _, protocol := range []string{"udp", "tcp"} {
			f := cluster.Flow{Protocol: protocol, To: netip.AddrPortFrom(w.to, w.port)}
			flows = append(flows, f)
			wanted[f] = cluster.Seen{By: w.by, Source: w.source}
		}
	}
	var seen map[cluster.Flow]cluster.Seen
	for deadline := time.Now().Add(5 * time.Second); ; {
		seen = sender.Ask(t, flows...)
		unanswered := false
		for _, s := range seen {
			unanswered = unanswered || s.Failure != ""
		}
		if !unanswered || time.Now().After(deadline) {
			break
		}
	}
	for _, f := range flows {
		assert.Equal(t, fmt.Sprintf("%s to %s: seen", name, f), seen[f], wanted[f])
	}
}

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
						c.ApplyOverlay(t, fmt.Sprintf(statedBackend, b.stated), b.install)
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
		nft := assert.Must(n.Output(t.Context(), "nft", "list", "tables"))(t)
		iptables := assert.Must(n.Output(t.Context(), "iptables-save", "-t", "nat"))(t)
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
		found[n.Name] = assert.Must(nodeTraces(t.Context(), n))(t)
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
	assert.Equal(t, "traces", traces(t, c), before)
}
