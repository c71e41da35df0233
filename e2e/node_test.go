// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// node is a topology with one node whose runtime is cnitool. Its dataDir, conflists and programs
// are in a directory of its own.
type node struct {
	*topology.Topology
	backend backend
	// dir is a directory on the sandbox's /run that only this node uses.
	dir string
	// ownDir is where own finds the files of the node.
	ownDir string
	// dataDir is the dataDir of entries that do not set one.
	dataDir string
	// path is the PATH of the plugins. It has the rule programs of the backend, and none with
	// nftables.
	path string
	// prefix starts the reconciler with limits: setpriv with its options.
	prefix []string
	cni    *topology.CNI

	networks []string // by name, in the order of their subnets
	pods     int
	ports    uint16 // used by probes
	// listeners counts the listen addresses that were assigned to programs on the node.
	listeners int
}

// newNode makes a node for a backend. It has no network yet.
func newNode(t *testing.T, f backend) *node {
	t.Helper()
	world := topology.New(t, topology.Options{})
	// The sandbox's /run is empty at the start and is removed with the sandbox.
	dir := filepath.Join("/run", filepath.Base(world.Node.Path))
	must(t, os.Mkdir(dir, 0o755))
	n := &node{Topology: world, backend: f, dir: dir, ownDir: dir + ".own", dataDir: filepath.Join(dir, "data")}
	must(t, world.Node.Enclose(n.mountOwn))
	n.path = f.programs(t, filepath.Join(dir, "bin"))
	n.cni = topology.NewCNI(t, n.Node, filepath.Join(dir, "net.d"))
	n.cni.Env = []string{"PATH=" + n.path}
	if _, err := os.Stat(n.plugin(t)); err != nil {
		t.Fatalf("%v (`make build` builds it)", err)
	}
	return n
}

// mountOwn gives the programs of the node files of their own at default paths.
func (n *node) mountOwn() error {
	// A thread has mounts of its own only with a root and working directory of its own (setns(2)).
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make mount namespace: %w", err)
	}
	// The node sees what the test mounts; the test does not see the mounts of the node.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("receive mounts: %w", err)
	}
	const lock = "/run/xtables.lock"
	directories := []string{"/etc/cni", "/etc/ip-masq", "/var/lib/cni", "/run/containerd"}
	for _, path := range directories {
		if err := errors.Join(os.MkdirAll(path, 0o755), os.MkdirAll(n.own(path), 0o755)); err != nil {
			return err
		}
	}
	if err := errors.Join(os.MkdirAll(n.own("/run"), 0o755), os.WriteFile(lock, nil, 0o600), os.WriteFile(n.own(lock), nil, 0o600)); err != nil {
		return err
	}
	for _, path := range append(directories, lock) {
		if err := unix.Mount(n.own(path), path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount %s of the node: %w", path, err)
		}
	}
	return nil
}

// own is where the test finds a file of the node below /etc/cni, /etc/ip-masq, /var/lib/cni or
// /run/containerd.
func (n *node) own(path string) string { return filepath.Join(n.ownDir, path) }

// plugin returns the path of the built plugin.
func (n *node) plugin(t *testing.T) string {
	t.Helper()
	return filepath.Join(topology.BinDir(t), "ip-masq")
}

// entry returns a plugin entry with the node's defaults and these keys. A key with a nil value is
// removed.
func (n *node) entry(keys map[string]any) map[string]any {
	entry := map[string]any{"type": "ip-masq", "backend": n.backend.setting, "dataDir": n.dataDir}
	maps.Copy(entry, keys)
	maps.DeleteFunc(entry, func(_ string, value any) bool { return value == nil })
	return entry
}

// conflist writes the conflist of a network, with bridge and the plugin entry. Each network of a
// node has its own bridge and subnets; the first has 10.1.0.0/16 and fd00:1::/64.
func (n *node) conflist(t *testing.T, network string, keys map[string]any) {
	t.Helper()
	n.write(t, network, n.bridge(network), n.entry(keys))
}

// write writes a conflist with these plugins.
func (n *node) write(t *testing.T, network string, plugins ...map[string]any) {
	t.Helper()
	list := map[string]any{"cniVersion": "1.1.0", "name": network, "plugins": plugins}
	text := assert.Must(json.MarshalIndent(list, "", "  "))(t)
	must(t, n.cni.Write("10-"+network+".conflist", string(text)))
}

// bridge returns the main plugin's entry.
func (n *node) bridge(network string) map[string]any {
	i := n.index(network)
	any4, any6 := map[string]any{"dst": "0.0.0.0/0"}, map[string]any{"dst": "::/0"}
	return map[string]any{
		"type": "bridge", "bridge": fmt.Sprint("cni", i), "isGateway": true,
		"ipam": map[string]any{
			"type": "host-local", "dataDir": filepath.Join(n.dir, "ipam"), "routes": []any{any4, any6},
			"ranges": []any{
				[]any{map[string]any{"subnet": fmt.Sprintf("10.%d.0.0/16", i)}},
				[]any{map[string]any{"subnet": fmt.Sprintf("fd00:%d::/64", i)}},
			},
		},
	}
}

// index returns the number of a network, counted from 1.
func (n *node) index(network string) int {
	for i, known := range n.networks {
		if known == network {
			return i + 1
		}
	}
	n.networks = append(n.networks, network)
	return len(n.networks)
}

// pod is a pod with the addresses that the main plugin assigned.
type pod struct {
	*topology.Host
	addrs []netip.Addr
}

// addr returns the pod's address of the same family.
func (p *pod) addr(like netip.Addr) netip.Addr {
	for _, a := range p.addrs {
		if a.Is4() == like.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// newPod makes a pod without a network.
func (n *node) newPod(t *testing.T) *pod {
	t.Helper()
	n.pods++
	return &pod{Host: n.NewPod(t, fmt.Sprint("pod", n.pods))}
}

// pod makes a pod with a network. It fails the test if ADD fails.
func (n *node) pod(t *testing.T, network string) *pod {
	t.Helper()
	p := n.newPod(t)
	succeeds(t, "ADD")(n.add(t, network, p))
	return p
}

// add runs ADD through cnitool, which exits with 1 for any error, and records the pod's addresses.
func (n *node) add(t *testing.T, network string, p *pod) (stdout, stderr string, code int) {
	t.Helper()
	r := assert.Must(n.cni.Add(n.timeout(t), network, p.Host))(t)
	if r.ExitCode == 0 {
		p.addrs = addresses(t, r.Stdout)
	}
	return r.Stdout, r.Stderr, r.ExitCode
}

func (n *node) del(t *testing.T, network string, p *pod) (stdout, stderr string, code int) {
	t.Helper()
	r := assert.Must(n.cni.Del(n.timeout(t), network, p.Host))(t)
	return r.Stdout, r.Stderr, r.ExitCode
}

func (n *node) check(t *testing.T, network string, p *pod) (stdout, stderr string, code int) {
	t.Helper()
	r := assert.Must(n.cni.Check(n.timeout(t), network, p.Host))(t)
	return r.Stdout, r.Stderr, r.ExitCode
}

// tool runs a program on the node, preferring the backend's variant, and returns its output. It
// fails the test if the program fails.
func (n *node) tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	if own := filepath.Join(n.dir, "bin", name); filepath.Base(own) == name {
		if _, err := os.Stat(own); err == nil {
			name = own
		}
	}
	stdout, stderr, code := run(t, n.Node.Command(n.timeout(t), name, args...))
	if code != 0 {
		t.Fatalf("%s %s: exit code %d\n%s%s", name, strings.Join(args, " "), code, stdout, stderr)
	}
	return stdout
}

// rules returns all NAT rules of the node, as the backend's program lists them.
func (n *node) rules(t *testing.T) string {
	t.Helper()
	if n.backend.variant == "" {
		return n.tool(t, "nft", "list", "ruleset")
	}
	return n.tool(t, "iptables-save", "-t", "nat") + n.tool(t, "ip6tables-save", "-t", "nat")
}

// timeout returns a context that ends when timelimit.Wait is exceeded.
func (n *node) timeout(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := timelimit.Context(t.Context())
	t.Cleanup(cancel)
	return ctx
}

func run(t *testing.T, c *topology.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	err := c.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("run %s: %v", c.Path, err)
	}
	return out.String(), errs.String(), c.ProcessState.ExitCode()
}

// addresses returns the addresses in a CNI result.
func addresses(t *testing.T, result string) []netip.Addr {
	t.Helper()
	var r struct {
		IPs []struct{ Address netip.Prefix }
	}
	if err := json.Unmarshal([]byte(result), &r); err != nil {
		t.Fatalf("result of ADD: %v\n%s", err, result)
	}
	var addrs []netip.Addr
	for _, ip := range r.IPs {
		addrs = append(addrs, ip.Address.Addr())
	}
	return addrs
}

// backend is one of the backends and iptables variants in which a node keeps rules.
type backend struct {
	name    string
	setting string // value of the key backend
	variant string // variant of iptables and suffix of its programs; "" for nftables
}

func backends() []backend {
	return []backend{
		{"nftables", "nftables", ""},
		{"iptables-nft", "iptables", "nft"},
		{"iptables-legacy", "iptables", "legacy"},
	}
}

// onEveryBackend runs a test on one node per backend, beside other tests.
func onEveryBackend(t *testing.T, test func(t *testing.T, n *node)) {
	t.Helper()
	onBackends(t, backends(), test)
}

func onBackends(t *testing.T, some []backend, test func(t *testing.T, n *node)) {
	t.Helper()
	t.Parallel()
	for _, f := range some {
		t.Run(f.name, func(t *testing.T) { test(t, newNode(t, f)) })
	}
}

// programs fills a directory with links to the programs of the backend, so that the plain names are
// of its variant on any machine. It returns the directory as a PATH. For nftables the directory is
// empty.
func (f backend) programs(t *testing.T, dir string) string {
	t.Helper()
	must(t, os.Mkdir(dir, 0o755))
	if f.variant == "" {
		return dir
	}
	for _, base := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			program, err := exec.LookPath(base + "-" + f.variant + suffix)
			if err != nil {
				t.Fatalf("%v (`make packages` installs it)", err)
			}
			must(t, os.Symlink(program, filepath.Join(dir, base+suffix)))
		}
	}
	return dir
}

// TestMain runs at least six parallel tests at once unless -parallel is given, because most tests
// wait most of the time. A test does not run in parallel if it measures time, writes a directory
// that all nodes share (/etc, /var/lib, /run/containerd), or runs verbs within the test process
// without time to wait for the lock, whose file descriptor a fork inherits.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", fmt.Sprint(max(6, runtime.GOMAXPROCS(0)))); err != nil {
		panic(err)
	}
	os.Exit(sandbox.Run(m))
}
