// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
)

// TestMigrate moves a cluster from an agent to the plugin and back, node by node, by the commands of
// docs/migrate.md. It checks every packet of continuous senders, except while one node is rolled back.
func TestMigrate(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, cluster.Options{ProxyMode: "nftables"})
	a, exempt := newAgent(), netip.MustParsePrefix("198.51.100.0/24")
	m := &migration{Cluster: c, user: newUser(t, c), agent: a, streams: &streams{
		Cluster: c, recorder: c.Record(t), exempt: exempt, to: []netip.Addr{c.World.Outside.Addrs[0], exempt.Addr().Next()},
	}}
	must(t, c.Apply(ctx, a.manifest(t)))
	awaitRollout(t, c, "ip-masq-agent")
	for _, n := range c.Nodes {
		a.run(t, n)
	}
	m.began = time.Now()
	for _, n := range c.Nodes {
		must(t, c.Start(ctx, m.pod("stream-"+n.Name, n)))
	}
	m.expectPackets(t)
	m.run(t, "migrate.md", "agent-$object.yaml")

	t.Run("preview", m.preview)
	t.Run("replace", m.replace)
	t.Run("move", m.move)
	t.Run("roll back", m.rollBack)
}

// agent is an agent as deployed in a cluster: its ConfigMap, and the rules that result from it and the
// DaemonSet's args.
type agent struct {
	config string
	chain  string
	rules  []string
}

func newAgent() agent {
	return agent{
		config: "nonMasqueradeCIDRs:\n  - 10.0.0.0/8\n  - 198.51.100.0/24\nmasqLinkLocal: false\nresyncInterval: 60s\n",
		chain:  "IP-MASQ",
		rules:  []string{"-d 169.254.0.0/16 -j RETURN", "-d 10.0.0.0/8 -j RETURN", "-d 198.51.100.0/24 -j RETURN", "-j MASQUERADE --random-fully"},
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

// manifest returns the objects of an agent whose process does nothing: the test creates its rules.
func (a agent) manifest(t *testing.T) string {
	t.Helper()
	labels := object{"k8s-app": "ip-masq-agent"}
	metadata := object{"name": "ip-masq-agent", "namespace": "kube-system"}
	items := []object{
		{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": object{"config": a.config}},
		{"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": object{
			"selector": object{"matchLabels": labels},
			"template": object{"metadata": object{"labels": labels}, "spec": object{
				"hostNetwork": true,
				"containers": []object{{
					"name": "ip-masq-agent", "image": containerd.PodImage, "imagePullPolicy": "Never", "args": cluster.Serving("agent"),
					"securityContext": object{"privileged": true},
				}},
			}},
		}},
	}
	return string(assert.Must(json.Marshal(object{"apiVersion": "v1", "kind": "List", "items": items}))(t))
}

type object = map[string]any

// migration is a cluster that migrates from an agent.
type migration struct {
	*cluster.Cluster
	*user
	*streams
	agent agent
}

// kustomization writes the files of a directory of docs/migrate.md, which a test of the package deploy
// compares with the document.
func (m *migration) kustomization(t *testing.T, source, directory string) {
	t.Helper()
	for _, file := range assert.Must(filepath.Glob("../../deploy/testdata/" + source + "/*"))(t) {
		text := string(assert.Must(os.ReadFile(file))(t))
		m.write(t, filepath.Join(directory, filepath.Base(file)), strings.ReplaceAll(text, "../../kustomize/", "../deploy/kustomize/"))
	}
}

// withoutPatch removes the last operation of the patch in a kustomization, or the patch.
func (m *migration) withoutPatch(t *testing.T, path, first string) {
	t.Helper()
	text, _, found := strings.Cut(m.read(t, path), first)
	if !found {
		t.Fatalf("%s has no %q", path, first)
	}
	m.write(t, path, text)
}

// onNode runs commands of docs/migrate.md with NODE as a node's name.
func (m *migration) onNode(t *testing.T, n *cluster.Node, part string) {
	t.Helper()
	commands := strings.ReplaceAll(documented(t, "migrate.md", part), "NODE=worker-1\n", "")
	// A pod that does not exist yet cannot be waited for.
	commands = strings.ReplaceAll(commands, "kubectl -n kube-system wait", "sleep 3; kubectl -n kube-system wait")
	m.shell(t, "NODE="+n.Name+"\n"+commands)
}

// expectPackets waits for new packets of each node, and checks all packets so far.
func (m *migration) expectPackets(t *testing.T) {
	t.Helper()
	for _, n := range m.Nodes {
		m.awaitFrom(t, n.Pods, time.Now())
	}
	m.expectRight(t)
}

// expectRules fails the test unless the chain is only in one backend of the node.
func (m *migration) expectRules(t *testing.T, n *cluster.Node, backend string) {
	t.Helper()
	must(t, cluster.Await(t.Context(), cluster.Patience, func() error {
		tables := assert.Must(n.Output(t.Context(), "nft", "list", "tables"))(t)
		rules := assert.Must(n.Output(t.Context(), "iptables-save", "-t", "nat"))(t)
		inNFTables, inIPTables := strings.Contains(tables, "table ip ip-masq\n"), strings.Contains(rules, "-j "+m.agent.chain+"\n")
		if inNFTables != (backend == "nftables") || inIPTables != (backend == "iptables") {
			return fmt.Errorf("%s: the rules are not in %s alone:\n%s%s", n.Name, backend, tables, rules)
		}
		return nil
	}))
}

// verify runs the verification of docs/migrate.md, and checks packets.
func (m *migration) verify(t *testing.T) {
	t.Helper()
	if output := m.run(t, "migrate.md", "not right"); strings.Contains(output, "not right") || !strings.Contains(output, "right: "+m.agent.chain) {
		t.Error(output)
	}
	m.expectPackets(t)
}

func (m *migration) preview(t *testing.T) {
	text := strings.ReplaceAll(m.read(t, "deploy/kustomize/preview.yaml"), "NODE", m.Nodes[0].Name)
	m.write(t, "preview.yaml", text)
	defer func() {
		if t.Failed() {
			logs, err := m.Kubectl(t.Context(), "logs", "-n", "kube-system", "ip-masq-preview")
			t.Log(logs, err)
		}
	}()
	if output := m.run(t, "migrate.md", "preview.yaml"); !strings.Contains(output, "right: IP-MASQ (ipv4, iptables (nft), 4 rules)\n") {
		t.Errorf("the preview prints:\n%s", output)
	}
}

func (m *migration) replace(t *testing.T) {
	first := m.Nodes[0]
	m.kustomization(t, "migrate-replace", "replace")
	canary := func() {
		m.run(t, "migrate.md", "kubectl replace --save-config -k replace")
		m.onNode(t, first, "NODE=worker-1")
		awaitReadyz(t, first)
		if status, _, err := m.Nodes[1].Readyz(t.Context()); err == nil {
			t.Errorf("the second node has a reconciler already: %d", status)
		}
		m.verify(t)
	}
	canary()
	m.run(t, "migrate.md", "kubectl replace -f agent-daemonset.yaml")
	m.agent.resync(t, first)
	m.expectPackets(t)
	canary()

	m.withoutPatch(t, "replace/kustomization.yaml", "      - op: replace\n        path: /spec/updateStrategy")
	m.run(t, "migrate.md", "kubectl apply -k replace")
	for _, n := range m.Nodes {
		m.expectRules(t, n, "iptables")
	}
	m.verify(t)
}

func (m *migration) move(t *testing.T) {
	ctx := t.Context()
	first, second := m.Nodes[0], m.Nodes[1]
	start := func(name string, n *cluster.Node) {
		must(t, m.Start(ctx, m.pod(name, n)))
		m.expectPackets(t)
		must(t, m.Delete(ctx, name))
	}
	m.kustomization(t, "migrate-move", "move")
	m.shell(t, "kubectl apply -k move")
	m.onNode(t, first, "ip-masq.github.io/plugin=true")
	m.expectRules(t, first, "nftables")
	m.expectRules(t, second, "iptables")
	m.verify(t)
	start("moved", first)

	// Between the two labels the node has no rules: its sender pauses.
	must(t, m.Delete(ctx, "stream-"+first.Name))
	m.kustomization(t, "migrate-uninstall", "back")
	m.onNode(t, first, "kubectl apply -k back")
	m.expectRules(t, first, "iptables")
	must(t, m.Start(ctx, m.pod("stream-"+first.Name, first)))
	m.verify(t)

	for _, n := range m.Nodes {
		m.onNode(t, n, "ip-masq.github.io/plugin=true")
	}
	m.withoutPatch(t, "move/kustomization.yaml", "patches:")
	m.run(t, "migrate.md", "kubectl apply -k move\n")
	for _, n := range m.Nodes {
		m.expectRules(t, n, "nftables")
		start("moved-too", n)
	}
	m.verify(t)
}

func (m *migration) rollBack(t *testing.T) {
	text := strings.ReplaceAll(string(assert.Must(os.ReadFile("../../deploy/testdata/uninstall-keep-rules/kustomization.yaml"))(t)),
		"../../kustomize/", "../deploy/kustomize/")
	m.write(t, "keep-rules/kustomization.yaml", text)
	m.shell(t, strings.ReplaceAll(documented(t, "operate.md", "kubectl apply -k keep-rules"), "deploy/kustomize/base", "move"))
	m.shell(t, "kubectl delete -k keep-rules")
	m.expectPackets(t)

	commands, _, _ := strings.Cut(documented(t, "migrate.md", "-f agent-daemonset.yaml\nkubectl -n kube-system rollout status daemonset/ip-masq-agent\nfor"), "for ")
	m.shell(t, commands)
	for _, n := range m.Nodes {
		m.agent.run(t, n)
	}
	m.run(t, "migrate.md", "uninstall-iptables")
	for _, n := range m.Nodes {
		m.expectRules(t, n, "iptables")
		if _, err := os.Stat(n.Path("/var/lib/cni/ip-masq")); err == nil {
			t.Errorf("%s has state", n.Name)
		}
	}
	m.expectPackets(t)
	t.Logf("%d packets, each from the right address", len(m.recorder.Since(m.began)))
}
