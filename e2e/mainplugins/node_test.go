// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package mainplugins

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

const (
	binDir    = "/opt/cni/bin"
	confDir   = "/etc/cni/net.d"
	entryFile = "/etc/ip-masq/entry.json"
	dataDir   = "/var/lib/cni/ip-masq"
	health    = "127.0.0.1:19820"
	metrics   = "127.0.0.1:19821"

	entry = `{"type": "ip-masq", "backend": "nftables", "enableIPv6": true,
		"nonMasqueradeCIDRs": ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fd00::/8"]}`
)

// node is a machine with containerd and the binaries of plugins, also that of ip-masq.
type node struct {
	*topology.Topology
	*machine.Machine
	runtime    *containerd.Runtime
	reconciler *machine.Daemon
	pods       []*pod // that run
}

// pod is a pod with its network namespace as a host.
type pod struct {
	*containerd.Pod
	host *topology.Host
}

// newNode makes a node. Where a plugin needs a daemon, a script in its place runs ptp.
func newNode(t *testing.T, version, needs string) *node {
	t.Helper()
	world := topology.New(t, topology.Options{})
	n := &node{Topology: world, Machine: machine.New(t, world.Node)}
	bin := topology.BinDir(t)
	for _, program := range []string{"ip-masq", "cni/ptp", "cni/bridge", "cni/host-local", "cni/loopback", "cni/portmap", "cni/multus"} {
		must(t, n.Install(filepath.Join(bin, program), filepath.Join(binDir, filepath.Base(program))))
	}
	if needs != "" {
		must(t, n.WriteFile(filepath.Join(binDir, needs), fmt.Sprintf(`#!/bin/sh
exec %s/ptp <<END
{"cniVersion": %q, "name": "replaced", "type": "ptp", "ipam": {"type": "host-local",
 "ranges": [[{"subnet": "10.244.0.0/24"}], [{"subnet": "fd00:10:244::/64"}]],
 "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}
END
`, binDir, version), 0o755))
	}
	must(t, n.WriteFile(entryFile, entry, 0o644))
	must(t, os.MkdirAll(n.Path(confDir), 0o755))
	n.runtime = containerd.New(t, n.Machine, containerd.Options{})
	return n
}

// run runs the reconciler until the end of the test or n.reconciler.Stop.
func (n *node) run(t *testing.T, args ...string) {
	t.Helper()
	program := filepath.Join(topology.BinDir(t), "ip-masq-reconciler")
	args = append([]string{"run", "--health-listen", health, "--metrics-listen", metrics, "--conflist-manage", "--conflist-entry-file", entryFile}, args...)
	n.reconciler = assert.Must(n.StartDaemon("reconciler", nil, program, args...))(t)
}

// command runs a command of the reconciler to its end.
func (n *node) command(t *testing.T, args ...string) (output string, code int) {
	t.Helper()
	c := n.Command(within(t), filepath.Join(topology.BinDir(t), "ip-masq-reconciler"), args...)
	text, err := c.CombinedOutput()
	if err != nil && c.ProcessState == nil {
		t.Fatal(err)
	}
	return string(text), c.ProcessState.ExitCode()
}

// get returns the reconciler's answer, with code 0 if there is none.
func (n *node) get(t *testing.T, url string) (code int, body string) {
	t.Helper()
	code, body, err := n.HTTPGet(t.Context(), "http://"+url)
	if err != nil {
		return 0, err.Error()
	}
	return code, body
}

// untilReady waits until the node is ready.
func (n *node) untilReady(t *testing.T) {
	t.Helper()
	body := ""
	until(t, 15*time.Second, func() string { return "ready: " + body }, func() bool {
		code, text := n.get(t, health+"/readyz")
		body = text
		return code == http.StatusOK
	})
}

// untilUnready waits until /readyz says all of these.
func (n *node) untilUnready(t *testing.T, limit time.Duration, says ...string) {
	t.Helper()
	body := ""
	until(t, limit, func() string { return fmt.Sprintf("not ready with %q: %s", says, body) }, func() bool {
		code, text := n.get(t, health+"/readyz")
		body = text
		return code == http.StatusServiceUnavailable && !slices.ContainsFunc(says, func(s string) bool { return !strings.Contains(text, s) })
	})
}

// entries returns the number of plugin entries in a file of the configuration directory.
func (n *node) entries(file string) int {
	text, _ := os.ReadFile(n.Path(filepath.Join(confDir, file))) // a missing one has none
	return len(regexp.MustCompile(`"type": *"ip-masq"`).FindAll(text, -1))
}

// untilEntry waits until a file has the plugin entry once, and returns how long that took.
func (n *node) untilEntry(t *testing.T, file string) time.Duration {
	t.Helper()
	start := time.Now()
	until(t, 5*time.Second, func() string { return "the plugin entry in " + file }, func() bool { return n.entries(file) == 1 })
	return time.Since(start)
}

// metric returns a value of the reconciler's metrics.
func (n *node) metric(t *testing.T, name string) string {
	t.Helper()
	_, body := n.get(t, metrics+"/metrics")
	for line := range strings.Lines(body) {
		if value, ok := strings.CutPrefix(line, "ip_masq_"+name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("no metric %s in\n%s", name, body)
	return ""
}

// untilHealthy waits until doctor finds nothing but these: the reconciler may be applying a policy.
func (n *node) untilHealthy(t *testing.T, findings ...string) {
	t.Helper()
	text := ""
	until(t, 5*time.Second, func() string { return "doctor: " + text }, func() bool {
		var code int
		text, code = n.command(t, "doctor", "-o", "json")
		var found struct{ Findings []struct{ ID string } }
		return code == 0 && json.Unmarshal([]byte(text), &found) == nil &&
			!slices.ContainsFunc(found.Findings, func(f struct{ ID string }) bool { return !slices.Contains(findings, f.ID) })
	})
}

// runPod starts a pod.
func (n *node) runPod(t *testing.T, name string) (*pod, error) {
	t.Helper()
	until(t, 10*time.Second, func() string { return "the network of containerd" }, func() bool {
		return n.runtime.NetworkReady(within(t), t).Status
	})
	started, err := n.runtime.RunPod(within(t), name)
	if err != nil {
		return nil, err
	}
	p := &pod{started, n.Adopt(t, name, started.Netns)}
	n.pods = append(n.pods, p)
	return p, nil
}

// pod starts a pod, whose first packets must have the policy's source addresses, or without
// ip-masq the pod's. They are sent by a container as soon as it starts.
func (n *node) pod(t *testing.T, name string, masqueraded bool) {
	t.Helper()
	p := assert.Must(n.runPod(t, name))(t)
	p.FirstPackets(within(t), t, n.Topology, destinations(masqueraded))
}

// destinations returns destinations of pods, without ip-masq none of which is masqueraded.
func destinations(masqueraded bool) []containerd.Destination {
	all := containerd.Destinations()
	for i := range all {
		all[i].Masqueraded = all[i].Masqueraded && masqueraded
	}
	return all
}

// packets sends from each pod to each destination, and compares the source address that the receiver sees.
func (n *node) packets(t *testing.T, masqueraded bool) {
	t.Helper()
	for _, p := range n.pods {
		for _, d := range destinations(masqueraded) {
			seen, err := p.host.SendUDP(netip.MustParseAddrPort(d.To))
			if want := d.Source(n.Topology, p.Addrs); err != nil || seen.Source.Addr() != want {
				t.Errorf("pod %s to %s: %s saw %s, want %s; %v", p.Name, d.To, seen.By, seen.Source, want, err)
			}
		}
	}
}

// endPods stops and removes all pods; the runtime calls DEL for both.
func (n *node) endPods(t *testing.T) {
	t.Helper()
	for _, p := range n.pods {
		must(t, p.host.Close())
		must(t, p.Stop(within(t)))
		must(t, p.Remove(within(t)))
	}
	n.pods = nil
}

// wantGone checks that nothing of ip-masq remains, and that the conflist is the main CNI plugin's.
func (n *node) wantGone(t *testing.T, file, conflist string) {
	t.Helper()
	if text, err := os.ReadFile(n.Path(filepath.Join(confDir, file))); err != nil || string(text) != conflist {
		t.Errorf("%s: %v\n%s", file, err, text)
	}
	for _, path := range []string{binDir + "/ip-masq", dataDir} {
		if _, err := os.Lstat(n.Path(path)); !os.IsNotExist(err) {
			t.Errorf("%s: %v, want it gone", path, err)
		}
	}
	if rules, err := n.Command(within(t), "nft", "list", "ruleset").CombinedOutput(); err != nil || strings.Contains(string(rules), "ip-masq") {
		t.Errorf("rules: %v\n%s", err, rules)
	}
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

var must = assert.NoError

// until waits until a condition holds.
func until(t *testing.T, limit time.Duration, what func() string, done func() bool) {
	t.Helper()
	if !timelimit.Await(limit, done) {
		t.Fatalf("not within %s: %s", limit, what())
	}
}

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }
