// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
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
	topology.T
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
func NewNode(t topology.T, backend Backend) *Node {
	n := &Node{T: t, Backend: backend, Topology: topology.New(t, topology.Options{}), binaries: topology.BinDir(t)}
	n.Dir = filepath.Join("/run", filepath.Base(n.Node.Path))
	n.DataDir, n.programs = filepath.Join(n.Dir, "data"), filepath.Join(n.Dir, "bin")
	n.stdin = filepath.Join(n.Dir, "stdin")
	assert.NoError(t, os.MkdirAll(n.programs, 0o755))
	n.link()
	assert.NoError(t, n.Outside.Do(dropAll))
	n.pod = n.AddPod(t, "pod", PodAddress(), netip.MustParseAddr("fd00:244::5"))
	return n
}

// PodAddress is the address of the pod that opens connections.
func PodAddress() netip.Addr { return netip.MustParseAddr("10.244.0.5") }

// link fills the only directory of PATH with the backend's programs.
func (n *Node) link() {
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
			n.Fatalf("find programs: %v (`make packages` installs them)", err)
		}
	}
}

// Policy is the policy of an entry.
type Policy struct {
	Prefixes []netip.Prefix
	Keys     map[string]any // further keys of the entry
}

// Entry returns the plugin entry as a runtime passes it on stdin. The exemption of link-local
// addresses is off, so that the number of exempt prefixes is that of the policy, apart from multicast
// and broadcast.
func (n *Node) Entry(p Policy) []byte {
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
	return assert.Must(json.Marshal(entry))(n)
}

// State sets the policy of the following ADDs without running any.
func (n *Node) State(p Policy) { assert.NoError(n, os.WriteFile(n.stdin, n.Entry(p), 0o644)) }

// Enforce sets a policy and applies it with ip-masq.
func (n *Node) Enforce(p Policy) {
	n.State(p)
	n.Add("ip-masq")
}

// Feed gives text to a program on the node.
func (n *Node) Feed(text, program string, args ...string) {
	c := n.Node.Command(context.Background(), filepath.Join(n.programs, program), args...)
	c.Stdin = strings.NewReader(text)
	assert.Output(n, c)
}

// Install copies all built programs to a tmpfs, the sandbox's /opt/cni, and runs the copies. On a
// disk's file system the page sizes in the page cache depend on the time of writing, and one copy
// of a program can take 40 % more processor time to start than another.
func Install(t topology.T) {
	built := topology.BinDir(t)
	installed := assert.Must(os.MkdirTemp("/opt/cni", "installed-"))(t)
	t.Cleanup(func() { assert.NoError(t, errors.Join(os.RemoveAll(installed), os.Setenv("IPMASQ_BIN_DIR", built))) })
	err := os.CopyFS(filepath.Join(installed, "bench"), os.DirFS(filepath.Join(built, "bench")))
	for _, name := range []string{"ip-masq", "ip-masq-reconciler"} {
		program, readErr := os.ReadFile(filepath.Join(built, name))
		err = errors.Join(err, readErr, os.WriteFile(filepath.Join(installed, name), program, 0o755))
	}
	if err != nil {
		t.Fatalf("install programs: %v (`make bench` builds them)", err)
	}
	assert.NoError(t, os.Setenv("IPMASQ_BIN_DIR", installed))
}

// KubeProxyRules is the number of kube-proxy rules on a node that has third-party rules.
const KubeProxyRules = 5000

// AddKubeProxy adds rules to table nat as kube-proxy writes them.
func (n *Node) AddKubeProxy() {
	n.Feed(fixtures.KubeProxy(KubeProxyRules), "iptables-restore", "--noflush")
}

// AgentScript returns the agents' rules of a policy as input of iptables-restore.
func AgentScript(prefixes []netip.Prefix) string {
	const local, rest = "ip-masq-agent: local traffic is not subject to MASQUERADE", "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)"
	var b strings.Builder
	b.WriteString("*nat\n:" + Chain + " - [0:0]\n")
	for _, p := range prefixes {
		fmt.Fprintf(&b, "-A %s -m comment --comment %q -d %s -j RETURN\n", Chain, local, p)
	}
	fmt.Fprintf(&b, "-A %s -m comment --comment %q -j MASQUERADE --random-fully\nCOMMIT\n", Chain, rest)
	return b.String()
}

// Prefixes returns n IPv4 prefixes, at most 28,000, of lengths from 19 to 32 in a shuffled order. Each is the
// beginning of a /18 of its own, so that none are nested or adjacent and none are merged. The result depends
// only on n.
func Prefixes(n int) []netip.Prefix {
	var all []netip.Prefix
	for i := range n {
		all = append(all, netip.PrefixFrom(fromUint32(16<<24+uint32(i)<<14), 19+i%14))
	}
	random := rand.New(rand.NewPCG(3, uint64(n)))
	random.Shuffle(n, func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// Elsewhere returns an address outside all prefixes.
func Elsewhere() netip.Addr { return netip.MustParseAddr("198.18.0.1") }

func fromUint32(v uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], v)
	return netip.AddrFrom4(b)
}
