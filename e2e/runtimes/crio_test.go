// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// crioPod is a network namespace that is attached to a node's network.
type crioPod struct {
	*topology.Host
	name  string
	addrs []netip.Addr
}

// crioCommand calls the plugins as CRI-O does.
func (n *node) crioCommand(t *testing.T, args ...string) *topology.Cmd {
	t.Helper()
	program := filepath.Join(topology.BinDir(t), "cni/crioverbs")
	c := n.Command(within(t), program, slices.Insert(args, 1, conflistDir)...)
	c.Env = []string{"PATH=" + programDir, "CNI_PATH=" + binDir}
	return c
}

// crio returns the combined output.
func (n *node) crio(t *testing.T, args ...string) (output string, code int) {
	t.Helper()
	c := n.crioCommand(t, args...)
	text, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("crioverbs: %v", err)
	}
	return string(text), c.ProcessState.ExitCode()
}

func (n *node) crioMust(t *testing.T, args ...string) string {
	t.Helper()
	output, code := n.crio(t, args...)
	if code != 0 {
		t.Fatalf("%v: exit code %d: %s", args, code, output)
	}
	return output
}

// crioLoads loads the conflists continuously until done is called. It fails the test unless CRI-O
// always finds the network.
func (n *node) crioLoads(t *testing.T) (done func()) {
	t.Helper()
	var stopped atomic.Bool
	var loading sync.WaitGroup
	loading.Go(func() {
		for !stopped.Load() {
			if output, err := n.crioCommand(t, "load").CombinedOutput(); err != nil || string(output) != "pods\n" {
				t.Errorf("load: %v: %s", err, output)
				return
			}
		}
	})
	return func() {
		stopped.Store(true)
		loading.Wait()
	}
}

// crioRun attaches a pod with ADD and CHECK.
func (n *node) crioRun(t *testing.T, name string) *crioPod {
	t.Helper()
	n.netns(t, "add", name)
	p := &crioPod{Host: n.adopt(t, n.Path("/run/netns/"+name)), name: name}
	text := n.crioMust(t, "run", name, "/run/netns/"+name)
	var result struct {
		IPs []struct{ Address netip.Prefix }
	}
	if err := json.Unmarshal([]byte(text), &result); err != nil {
		t.Fatalf("result: %v: %s", err, text)
	}
	for _, ip := range result.IPs {
		p.addrs = append(p.addrs, ip.Address.Addr())
	}
	return p
}

func (n *node) netns(t *testing.T, verb, name string) {
	t.Helper()
	if output, code := n.ended(t, nil, "ip", "netns", verb, name); code != 0 {
		t.Fatal(output)
	}
}

func (n *node) crioStop(t *testing.T, p *crioPod) {
	t.Helper()
	n.crioMust(t, "stop", p.name, "/run/netns/"+p.name)
}

// crioCalls are the calls of the plugin that are recorded since the previous time.
type crioCalls func() []call

// want compares the calls with "VERB" or, for calls that have the entry, "VERB prefixes", where
// prefixes is the number of nonMasqueradeCIDRs.
func (c crioCalls) want(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for _, call := range c() {
		text := call.verb
		if call.verb != "VERSION" {
			text += fmt.Sprint(" ", call.prefixes)
		}
		got = append(got, text)
	}
	assert.Equal(t, "calls", got, want)
}

// more returns the keys of the entry with one more prefix, of which nothing is in destinations.
func more() object {
	keys := prefixes()
	keys["nonMasqueradeCIDRs"] = append(keys["nonMasqueradeCIDRs"].([]string), "198.18.0.0/15")
	return keys
}

// wantExempt checks the verdicts of more.
func (n *node) wantExempt(t *testing.T, p *crioPod) {
	t.Helper()
	n.verdicts(t, p.Host, p.addrs)
	seen := assert.Must(p.SendUDP(netip.MustParseAddrPort("198.18.0.1:7")))(t)
	if !slices.Contains(p.addrs, seen.Source.Addr()) {
		t.Errorf("198.18.0.1 saw %s, want one of %s", seen.Source, p.addrs)
	}
}

// TestCRIO checks the calls that CRI-O makes: VERSION when it loads the conflists; STATUS, GC and
// CHECK of each pod at its start; ADD, and CHECK right after it. CHECK and DEL have the entry of the
// ADD, except for the DEL that GC sends.
func TestCRIO(t *testing.T) {
	for _, f := range forms() {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			n.version = "1.1.0"
			calls := crioCalls(n.spy(t))
			n.conflist(t, bridge(), n.entry(prefixes()))
			n.crioMust(t, "start")
			calls.want(t, "VERSION", "STATUS 4", "GC 4")
			one := n.crioRun(t, "one")
			n.crioRun(t, "lost")
			calls.want(t, "VERSION", "ADD 4", "CHECK 4", "VERSION", "ADD 4", "CHECK 4")
			n.verdicts(t, one.Host, one.addrs)
			n.wantAttachments(t, 2)

			// Calls with an earlier entry do not fail, and change no rule.
			n.conflist(t, bridge(), n.entry(more()))
			three := n.crioRun(t, "three")
			n.wantExempt(t, three)
			calls.want(t, "VERSION", "ADD 5", "CHECK 5")
			n.crioMust(t, "start", "one", "lost", "three")
			calls.want(t, "VERSION", "STATUS 5", "GC 5", "CHECK 4", "CHECK 4", "CHECK 5")
			n.wantAttachments(t, 3)
			n.crioStop(t, one)
			n.crioStop(t, one) // CRI-O may repeat DEL
			calls.want(t, "VERSION", "DEL 4", "VERSION", "DEL 5")
			n.wantExempt(t, three)
			n.wantAttachments(t, 2)

			// A pod ends while CRI-O is stopped.
			n.netns(t, "delete", "lost")
			n.crioMust(t, "start", "three")
			calls.want(t, "VERSION", "STATUS 5", "DEL 5", "GC 5", "CHECK 5")
			n.wantExempt(t, three)
			n.wantAttachments(t, 1)

			// CHECK and DEL come also after the entry was removed.
			n.conflist(t, bridge())
			four := n.crioRun(t, "four")
			calls.want(t)
			n.crioMust(t, "start", "three", "four")
			calls.want(t, "CHECK 5")
			n.crioStop(t, three)
			n.crioStop(t, four)
			calls.want(t, "DEL 5")
			n.wantAttachments(t, 0)
		})
	}
}

// TestCRIOSinglePlugin installs the plugin beside a main plugin whose configuration is no list.
func TestCRIOSinglePlugin(t *testing.T) {
	n := newNode(t, forms()[0])
	n.bare(t)
	must(t, os.Remove(n.Path(conflistDir+"/10-pods.conflist")))
	single := bridge()
	single["cniVersion"], single["name"] = n.version, "pods"
	text := assert.Must(json.Marshal(single))(t)
	must(t, n.WriteFile(conflistDir+"/10-pods.conf", string(text), 0o644))
	done := n.crioLoads(t)
	defer done()
	old := n.crioRun(t, "old")
	n.wantAlone(t, old.Host, old.addrs)
	n.install(t)
	p := n.crioRun(t, "pod")
	n.verdicts(t, p.Host, p.addrs)
	n.crioMust(t, "start", "old", "pod")
	n.crioStop(t, old)
	n.wantAttachments(t, 1)
	n.crioStop(t, p)
	n.uninstall(t, 0)
	young := n.crioRun(t, "young")
	n.wantAlone(t, young.Host, young.addrs)
}
