// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

const exampleDir = "../conflist-examples"

// example is a node with the conflists of one or more files, and the expected verdicts for a pod of
// the first network.
type example struct {
	files       []string
	subnet      string // of the bridge that replaces an unavailable main plugin
	exempt      string // destinations that see the pod's address
	masqueraded string // destinations that see the node's address
	output      string // an address of the node that the pod leaves with
}

func examples() []example {
	return []example{
		{files: []string{"bridge"}, exempt: "10.20.0.5", masqueraded: "198.51.100.7 172.16.3.4"},
		{files: []string{"ptp"}, exempt: "10.20.0.5 192.168.77.1", masqueraded: "198.51.100.7 172.16.3.4"},
		{files: []string{"dual-stack"}, exempt: "10.20.0.5 fd00:20::5", masqueraded: "198.51.100.7 2001:db8:7::7"},
		{files: []string{"flannel"}, subnet: "10.244.1.0/24", exempt: "10.244.7.7 10.96.0.10", masqueraded: "10.20.0.5 198.51.100.7"},
		{files: []string{"calico"}, subnet: "192.168.99.0/24", exempt: "192.168.7.7 10.96.0.10", masqueraded: "10.20.0.5 198.51.100.7"},
		{files: []string{"cilium"}, subnet: "10.244.1.0/24", exempt: "10.20.0.5", masqueraded: "198.51.100.7 172.16.3.4"},
		{files: []string{"kindnet"}, exempt: "10.244.9.9", masqueraded: "10.20.0.5 198.51.100.7"},
		{files: []string{"many-prefixes"}, exempt: "10.0.2.5 10.3.198.255", masqueraded: "10.0.1.5 10.3.199.0 198.51.100.7"},
		{files: []string{"masquerade-only-these"}, exempt: "10.20.0.5 192.0.2.7", masqueraded: "198.51.100.7 203.0.113.77"},
		{files: []string{"forced-inside-exempt"}, exempt: "10.20.0.5 10.199.255.255", masqueraded: "10.200.1.1 198.51.100.7"},
		{files: []string{"scoped-to-pods"}, exempt: "10.20.0.5 172.16.3.4", masqueraded: "198.51.100.7"},
		{files: []string{"output-address"}, exempt: "10.20.0.5", output: "198.51.100.7"},
		{files: []string{"guard-drop"}, exempt: "10.20.0.5", masqueraded: "198.51.100.7 172.16.3.4"},
		{files: []string{"two-networks-blue", "two-networks-green"}, exempt: "172.16.3.4", masqueraded: "10.20.0.5 198.51.100.7"},
		{files: []string{"from-ip-masq-agent"}, exempt: "10.20.0.5 192.168.7.7 172.16.3.4", masqueraded: "198.51.100.7"},
		{files: []string{"from-ip-masq-agent-v2"}, exempt: "10.20.0.5", masqueraded: "172.16.3.4 198.51.100.7"},
	}
}

// TestExamples runs a pod with every file in conflist-examples and checks its packets.
func TestExamples(t *testing.T) {
	t.Parallel()
	var run []string
	for _, ex := range examples() {
		run = append(run, ex.files...)
		t.Run(strings.Join(ex.files, "+"), func(t *testing.T) {
			n := newNode(t, backends()[1])
			if ex.output != "" {
				n.address(t, "address add "+ex.output+"/32 dev outside")
			}
			var pods []*pod
			for _, file := range ex.files {
				pods = append(pods, n.pod(t, n.writeExample(t, file, ex.subnet)))
			}
			s := senders{"pod": {pods[0].Host, pods[0].addrs}}
			s.verdicts(t, n, false, map[string]string{"pod": ex.exempt})
			s.verdicts(t, n, true, map[string]string{"pod": ex.masqueraded})
			if ex.output != "" {
				n.leaves(t, pods[0].Host, "203.0.113.77", n.Outside, ex.output)
			}
			for i, file := range ex.files {
				network := n.writeExample(t, file, ex.subnet)
				succeeds(t, "CHECK")(n.check(t, network, pods[i]))
				succeeds(t, "DEL")(n.del(t, network, pods[i]))
			}
		})
	}
	files := topology.Must(filepath.Glob(filepath.Join(exampleDir, "*")))(t)
	for _, file := range files {
		name, isExample := strings.CutSuffix(filepath.Base(file), ".conflist")
		if isExample && !slices.Contains(run, name) {
			t.Errorf("%s has no row in examples", file)
		}
		if !isExample && filepath.Base(file) != "README.md" {
			t.Errorf("%s is neither a conflist nor README.md", file)
		}
	}
}

// writeExample writes the conflist of an example and returns the name of its network. It replaces
// an unavailable main plugin by bridge.
func (n *node) writeExample(t *testing.T, file, subnet string) string {
	t.Helper()
	text := topology.Must(os.ReadFile(filepath.Join(exampleDir, file+".conflist")))(t)
	var list struct {
		CNIVersion string            `json:"cniVersion"`
		Name       string            `json:"name"`
		Plugins    []json.RawMessage `json:"plugins"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	var first struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(list.Plugins[0], &first); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	if first.Type != "bridge" && first.Type != "ptp" {
		list.Plugins[0] = json.RawMessage(fmt.Sprintf(`{"type": "bridge", "bridge": "cni0", "isGateway": true,
			"ipam": {"type": "host-local", "subnet": %q, "routes": [{"dst": "0.0.0.0/0"}]}}`, subnet))
	}
	if list.CNIVersion != "1.0.0" {
		t.Errorf("%s: cniVersion is %s; containerd 1.6 and podman 4 need 1.0.0", file, list.CNIVersion)
	}
	out := topology.Must(json.Marshal(list))(t)
	must(t, n.cni.Write(file+".conflist", string(out)))
	return list.Name
}
