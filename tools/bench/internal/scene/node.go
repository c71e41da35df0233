// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Backend is a backend on a node.
type Backend struct {
	Name    string
	Kind    string // value of the key backend in the plugin entry
	Variant string // of iptables on this node
}

// Backends returns all backends. The nftables node has iptables-nft for third-party rules.
func Backends() []Backend {
	return []Backend{
		{"nftables", "nftables", "nft"},
		{"iptables-nft", "iptables", "nft"},
		{"iptables-legacy", "iptables", "legacy"},
	}
}

// Chain is the chain of all contenders.
const Chain = "IP-MASQ-AGENT"

// Node is a node with a backend and a pod.
type Node struct {
	*topology.Topology
	Backend Backend
	// Dir is private to the node; DataDir is the dataDir of the plugin entry.
	Dir, DataDir string

	programs string // the only directory of PATH
	binaries string
	pod      *topology.Host
	stdin    string // the file with the current entry
	pods     int
}

// NewNode returns a node without rules.
func NewNode(backend Backend) (n *Node, err error) {
	n = &Node{Backend: backend}
	if n.binaries, err = topology.BinDir(); err != nil {
		return nil, err
	}
	if n.Topology, err = topology.Build(topology.Options{}); err != nil {
		return nil, err
	}
	n.Dir = filepath.Join("/run", filepath.Base(n.Node.Path))
	n.DataDir, n.programs = filepath.Join(n.Dir, "data"), filepath.Join(n.Dir, "bin")
	n.stdin = filepath.Join(n.Dir, "stdin")
	if err := errors.Join(os.MkdirAll(n.programs, 0o755), n.link(), n.Outside.Do(dropAll)); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	if n.pod, err = n.AddPod("pod", PodAddress(), netip.MustParseAddr("fd00:244::5")); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// PodAddress is the address of the pod that opens connections.
func PodAddress() netip.Addr { return netip.MustParseAddr("10.244.0.5") }

// link fills the only directory of PATH with the backend's programs.
func (n *Node) link() error {
	links := map[string]string{"nft": "nft"}
	for _, base := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			links[base+suffix] = base + "-" + n.Backend.Variant + suffix
		}
	}
	for name, program := range links {
		genuine, err := exec.LookPath(program)
		if err == nil {
			err = os.Symlink(genuine, filepath.Join(n.programs, name))
		}
		if err != nil {
			return fmt.Errorf("find programs: %w (`make packages` installs them)", err)
		}
	}
	return nil
}

// Policy is the policy of an entry.
type Policy struct {
	Prefixes []netip.Prefix
	Keys     map[string]any // further keys of the entry
}

// Entry returns the plugin entry as a runtime passes it on stdin. The exemption of link-local
// addresses is off, so that the number of exempt prefixes is that of the policy.
func (n *Node) Entry(p Policy) ([]byte, error) {
	if p.Prefixes == nil {
		p.Prefixes = []netip.Prefix{}
	}
	entry := map[string]any{
		"cniVersion": "1.1.0", "name": "podnet", "type": "ip-masq", "backend": n.Backend.Kind, "dataDir": n.DataDir,
		"masqChain": Chain, "nonMasqueradeCIDRs": p.Prefixes, "cidrLimit": max(64, len(p.Prefixes)),
		"masqLinkLocal": true,
		"prevResult": map[string]any{
			"cniVersion": "1.1.0",
			"interfaces": []any{map[string]any{"name": "eth0", "sandbox": n.pod.Path}},
			"ips":        []any{map[string]any{"address": PodAddress().String() + "/16", "gateway": "10.244.0.1", "interface": 0}},
		},
	}
	maps.Copy(entry, p.Keys)
	return json.Marshal(entry)
}

// State sets the policy of the following ADDs without running any.
func (n *Node) State(p Policy) error {
	entry, err := n.Entry(p)
	if err != nil {
		return err
	}
	return os.WriteFile(n.stdin, entry, 0o644)
}

// Enforce sets a policy and applies it with ip-masq.
func (n *Node) Enforce(p Policy) error {
	if err := n.State(p); err != nil {
		return err
	}
	_, err := n.Add("ip-masq", n.NextPod())
	return err
}

// Feed gives text to a program on the node.
func (n *Node) Feed(text, program string, args ...string) error {
	c := n.Node.Command(context.Background(), filepath.Join(n.programs, program), args...)
	c.Stdin = strings.NewReader(text)
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s on %s: %w\n%s", program, strings.Join(args, " "), n.Backend.Name, err, out)
	}
	return nil
}
