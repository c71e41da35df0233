// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

type object = map[string]any

// form is a backend of a node.
type form struct {
	name    string
	backend string // the value of the key backend
	variant string // of iptables; else ""
}

func forms() []form {
	return []form{
		{"nftables", "nftables", ""},
		{"iptables-nft", "iptables", "nft"},
		{"iptables-legacy", "iptables", "legacy"},
	}
}

// serving is the time that a container may take to listen.
const serving = 5 * time.Second

const (
	binDir      = "/opt/cni/bin"
	programDir  = "/opt/cni/programs" // PATH of runtimes, and so of plugins
	conflistDir = "/etc/cni/net.d"
	dataDir     = "/var/lib/cni/ip-masq"
)

// node is a machine in a topology with the plugin installed.
type node struct {
	*topology.Topology
	*machine.Machine
	form form
	// version is the cniVersion of the runtime's conflists.
	version string
	// adopted counts the pods that were adopted as hosts.
	adopted int
}

// newNode makes a node with a backend. Its runtime's PATH has only the backend's programs.
func newNode(t *testing.T, f form) *node {
	t.Helper()
	world := topology.New(t, topology.Options{})
	n := &node{Topology: world, Machine: machine.New(t, world.Node), form: f, version: "1.0.0"}
	bin := topology.BinDir(t)
	for _, program := range []string{"ip-masq", "cni/bridge", "cni/host-local", "cni/loopback"} {
		must(t, n.Install(filepath.Join(bin, program), filepath.Join(binDir, filepath.Base(program))))
	}
	must(t, os.Mkdir(n.Path(programDir), 0o755))
	n.programs(t)
	return n
}

// programs puts the backend's programs, under their plain names, into the PATH.
func (n *node) programs(t *testing.T) {
	t.Helper()
	if n.form.variant == "" {
		return
	}
	for _, base := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			program := assert.Must(exec.LookPath(base + "-" + n.form.variant + suffix))(t)
			must(t, os.Symlink(program, filepath.Join(n.Path(programDir), base+suffix)))
		}
	}
}

// bridge returns the main plugin's entry, dual stack.
func bridge() object {
	return object{
		"type": "bridge", "bridge": "cni0", "isGateway": true,
		"ipam": object{
			"type": "host-local",
			"ranges": []any{
				[]any{object{"subnet": "10.1.0.0/16"}},
				[]any{object{"subnet": "fd00:1::/64"}},
			},
			"routes": []any{object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"}},
		},
	}
}

// entry returns the plugin entry with further keys.
func (n *node) entry(keys object) object {
	e := object{"type": "ip-masq", "backend": n.form.backend, "enableIPv6": true}
	maps.Copy(e, keys)
	return e
}

// list returns the conflist of the network pods.
func (n *node) list(t *testing.T, plugins ...object) string {
	t.Helper()
	text := assert.Must(json.MarshalIndent(object{"cniVersion": n.version, "name": "pods", "plugins": plugins}, "", "  "))(t)
	return string(text)
}

// conflist writes the conflist atomically, because runtimes watch its directory.
func (n *node) conflist(t *testing.T, plugins ...object) {
	t.Helper()
	must(t, n.WriteFile(filepath.Join(conflistDir, "10-pods.conflist"), n.list(t, plugins...), 0o644))
}

// attachments returns the number of attachments on record, of any boot.
func (n *node) attachments(t *testing.T) int {
	t.Helper()
	count := 0
	err := filepath.WalkDir(n.Path(dataDir+"/attachments"), func(_ string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			count++
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return count
}

func (n *node) wantAttachments(t *testing.T, want int) {
	t.Helper()
	assert.Equal(t, "attachments", n.attachments(t), want)
}

// ended runs a program on the node to its end.
func (n *node) ended(t *testing.T, env []string, name string, args ...string) (output string, code int) {
	t.Helper()
	c := n.Command(within(t), name, args...)
	if env != nil {
		c.Env = env
	}
	text, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s: %v", name, err)
	}
	return string(text), c.ProcessState.ExitCode()
}

// rules returns the node's rules of every backend, without tables that listing creates.
func (n *node) rules(t *testing.T) string {
	t.Helper()
	text, code := n.ended(t, nil, "nft", "-s", "list", "ruleset")
	if code != 0 {
		t.Fatalf("nft: %s", text)
	}
	if n.form.variant == "legacy" {
		legacy, _ := n.ended(t, nil, "iptables-legacy", "-t", "nat", "-S")
		text += legacy
	}
	return text
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

var must = assert.NoError

// until waits until a condition holds.
func until(t *testing.T, limit time.Duration, what string, done func() bool) {
	t.Helper()
	if !timelimit.Await(limit, done) {
		t.Fatalf("%s: not within %s", what, limit)
	}
}

// reconciler is a running reconciler on a node.
type reconciler struct {
	*machine.Daemon
	host *topology.Host
}

// health is its health address in the node's network.
const health = "127.0.0.1:19820"

// reconciler starts a reconciler with its own PATH, as in an image.
func (n *node) reconciler(t *testing.T, path string, args ...string) *reconciler {
	t.Helper()
	program := filepath.Join(topology.BinDir(t), "ip-masq-reconciler")
	all := append([]string{"run", "--enable-ipv6", "--health-listen", health}, args...)
	d := assert.Must(n.StartDaemon("reconciler", []string{"PATH=" + path}, program, all...))(t)
	r := &reconciler{d, n.Host}
	until(t, 10*time.Second, "first sync", func() bool {
		code, _ := r.ready(t)
		return code != 0
	})
	return r
}

// ready asks /readyz; the code is 0 without an answer and before the first sync.
func (r *reconciler) ready(t *testing.T) (code int, body string) {
	t.Helper()
	code, body, err := r.host.HTTPGet(t.Context(), "http://"+health+"/readyz")
	if err != nil {
		return 0, err.Error()
	}
	return code, body
}

// prefixes returns the keys of the entry that match containerd.Destinations.
func prefixes() object {
	return object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fd00::/8"}}
}

// adopt makes a host of a pod's network namespace.
func (n *node) adopt(t *testing.T, netns string) *topology.Host {
	t.Helper()
	n.adopted++
	h := n.Adopt(t, fmt.Sprint("adopted", n.adopted), netns)
	t.Cleanup(func() { must(t, h.Close()) })
	return h
}

// verdicts sends from a pod to all destinations with UDP and TCP and compares the seen source
// addresses with the policy.
func (n *node) verdicts(t *testing.T, h *topology.Host, addrs []netip.Addr) {
	t.Helper()
	for _, d := range containerd.Destinations() {
		for protocol, send := range map[string]func(netip.AddrPort, ...topology.Option) (topology.Seen, error){"udp": h.SendUDP, "tcp": h.SendTCP} {
			seen, err := send(netip.MustParseAddrPort(d.To))
			if err != nil {
				t.Errorf("%s to %s: %v", protocol, d.To, err)
				continue
			}
			if want := d.Source(n.Topology, addrs); seen.Source.Addr() != want {
				t.Errorf("%s to %s: %s saw %s, want %s", protocol, d.To, seen.By, seen.Source, want)
			}
		}
	}
}

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }
