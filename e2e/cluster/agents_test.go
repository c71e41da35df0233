// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// agent is one of the two agents as deployed in a cluster: its DaemonSet's args, its ConfigMap, and
// the rules that result from them.
type agent struct {
	name   string
	args   []string
	config string
	chain  string
	rules  []string
}

func agents() []agent {
	return []agent{
		{
			name:   "ip-masq-agent",
			args:   []string{"--masq-chain=IP-MASQ", "--nomasq-all-reserved-ranges", "--v=2", "--logtostderr"},
			config: "nonMasqueradeCIDRs:\n  - 10.0.0.0/8\n  - 198.51.100.0/24\nmasqLinkLocal: false\nresyncInterval: 60s\n",
			chain:  "IP-MASQ",
			rules:  []string{"-d 169.254.0.0/16 -j RETURN", "-d 10.0.0.0/8 -j RETURN", "-d 198.51.100.0/24 -j RETURN", "-j MASQUERADE --random-fully"},
		},
		{
			name:   "ip-masq-agent-v2",
			args:   []string{"--masq-chain=IP-MASQ-AGENT", "--enable-ipv6=false", "--random-fully=true", "--resync-interval=60"},
			config: `{"nonMasqueradeCIDRs": ["10.244.0.0/16", "192.168.0.0/16"], "masqLinkLocal": true}`,
			chain:  "IP-MASQ-AGENT",
			rules:  []string{"-d 10.244.0.0/16 -j RETURN", "-d 192.168.0.0/16 -j RETURN", "-j MASQUERADE --random-fully"},
		},
	}
}

// run creates the agent's rules on a node.
func (a agent) run(t *testing.T, n *cluster.Node) {
	t.Helper()
	lines := []string{
		"*nat", ":" + a.chain + " - [0:0]",
		`-A POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom ` +
			a.chain + ` chain" -m addrtype ! --dst-type LOCAL -j ` + a.chain,
	}
	for _, r := range a.rules {
		lines = append(lines, "-A "+a.chain+" "+r)
	}
	text := strings.Join(append(lines, "COMMIT", ""), "\n")
	must(t, n.WriteFile("/run/agent.rules", text, 0o600))
	must(t, n.Run(t.Context(), "sh", "-c", "iptables-restore --noflush </run/agent.rules"))
}

// resync writes the agent's chain again, as the agent does every minute. The jump must be there.
func (a agent) resync(t *testing.T, n *cluster.Node) {
	t.Helper()
	text := "*nat\n:" + a.chain + " - [0:0]\n-A " + a.chain + " " + strings.Join(a.rules, "\n-A "+a.chain+" ") + "\nCOMMIT\n"
	must(t, n.WriteFile("/run/agent.rules", text, 0o600))
	must(t, n.Run(t.Context(), "sh", "-ec", `iptables -t nat -C POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all `+
		`non-LOCAL destination traffic to our custom `+a.chain+` chain" -m addrtype ! --dst-type LOCAL -j `+a.chain+`
		iptables-restore --noflush </run/agent.rules`))
}

// stop removes the rules, as administrators do: the agents leave them.
func (a agent) stop(t *testing.T, n *cluster.Node) {
	t.Helper()
	must(t, n.Run(t.Context(), "sh", "-c", "rule=$(iptables -t nat -S POSTROUTING | grep -- '-j "+a.chain+"$' | sed 's/^-A/-D/') && eval iptables -t nat $rule && "+
		"iptables -t nat -F "+a.chain+" && iptables -t nat -X "+a.chain))
}

// verdicts returns the verdicts of the ConfigMap for a pod of a node.
func (a agent) verdicts(k *workload) []want {
	node, second := k.Nodes[0].Address, k.Nodes[1].Address
	wants := []want{
		{k.near, cluster.PeerPort, "near", k.client},
		{k.far, cluster.PeerPort, "far", k.client},
		{k.farIP, cluster.PeerPort, "far", k.client},
		{k.World.Outside.Addrs[0], topology.EchoPort, "outside", node},
	}
	by := func(exempt string) netip.Addr {
		for _, rule := range a.rules {
			if strings.Contains(rule, exempt) {
				return k.client
			}
		}
		return node
	}
	return append(wants,
		want{netip.MustParseAddr("198.51.100.7"), topology.EchoPort, "outside", by("198.51.100.0/24")},
		want{netip.MustParseAddr("10.77.7.7"), topology.EchoPort, "lan", by("10.0.0.0/8")},
		want{k.World.LAN.Addrs[0], topology.EchoPort, "lan", by("192.168.0.0/16")},
		want{second, cluster.PeerPort, "host2", by("192.168.0.0/16")},
	)
}

// TestAgentReplacement replaces either agent by the project's image, with the agent's own args and
// ConfigMap, and rolls back to the agent.
func TestAgentReplacement(t *testing.T) {
	c := newCluster(t, cluster.Options{ProxyMode: "nftables"})
	k := newWorkload(t, c)
	before := traces(t, c)
	for _, a := range agents() {
		t.Run(a.name, func(t *testing.T) {
			ctx := t.Context()
			expectSame := func() {
				t.Helper()
				expect(t, "client", c.FromPod("client"), a.verdicts(k)...)
			}
			must(t, c.Apply(ctx, string(topology.Must(json.Marshal(map[string]any{
				"apiVersion": "v1", "kind": "ConfigMap",
				"metadata": map[string]string{"name": "ip-masq-agent", "namespace": "kube-system"},
				"data":     map[string]string{"config": a.config},
			}))(t))))
			for _, n := range c.Nodes {
				a.run(t, n)
			}
			expectSame()

			args := topology.Must(json.Marshal(append([]string{"run"}, a.args...)))(t)
			must(t, c.ApplyOverlay(ctx, fmt.Sprintf(`patches:
- target: {kind: DaemonSet, name: ip-masq-agent}
  patch: |
    - op: replace
      path: /spec/template/spec/containers/0/args
      value: %s
`, args), "overlays/agent-replacement"))
			awaitRollout(t, c, "ip-masq-agent")
			expectSame()

			takeDown(t, c, "overlays/agent-replacement")
			expectSame()
			rollOut(t, c, "overlays/uninstall-iptables", "ip-masq-uninstall")
			expectNoTrace(t, c, before)
			takeDown(t, c, "overlays/uninstall-iptables")

			for _, n := range c.Nodes {
				a.run(t, n)
			}
			expectSame()
			for _, n := range c.Nodes {
				a.stop(t, n)
			}
			expectNoTrace(t, c, before)
		})
	}
}
