// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// TestPods starts and removes pods under the runtime and checks the verdict of every packet from
// the first one on.
func TestPods(t *testing.T) {
	onEvery(t, forms(), func(t *testing.T, n *criNode) {
		if was := n.ready(t, false); was.Message == "" {
			t.Errorf("without a conflist: %+v", was)
		}
		n.conflist(t, bridge(), n.entry(prefixes()))
		n.ready(t, true)
		one := n.pod(t, "one")
		n.firstPackets(t, one)
		host := n.adopt(t, one.Netns)
		n.verdicts(t, host, one.Addrs)
		n.wantAttachments(t, 1)

		two := n.pod(t, "two")
		two.Run(within(t), t, "serve", containerd.PodImage, "serve", "7", "two")
		for _, a := range two.Addrs {
			var seen topology.Seen
			until(t, serving, "two serves", func() bool {
				var err error
				seen, err = host.SendTCP(netip.AddrPortFrom(a, 7))
				return err == nil
			})
			if !slices.Contains(one.Addrs, seen.Source.Addr()) {
				t.Errorf("two saw one as %s, want one of %s", seen.Source, one.Addrs)
			}
		}
		n.wantAttachments(t, 2)
		n.end(t, one, two)
		n.wantAttachments(t, 0)
		if left, err := filepath.Glob(n.Path("/var/lib/cni/networks/pods/*.*.*.*")); err != nil || len(left) > 0 {
			t.Errorf("addresses are still given: %v %v", left, err)
		}
	})
}

// TestNamespace: the first packet of a pod already has the verdict of its Kubernetes namespace, which the runtime names.
func TestNamespace(t *testing.T) {
	onEvery(t, forms()[:1], func(t *testing.T, n *criNode) {
		keys := prefixes()
		keys["nonMasqueradeNamespaces"] = []string{"prod"}
		n.conflist(t, bridge(), n.entry(keys))
		n.ready(t, true)
		exempt := containerd.Destinations()
		for i := range exempt {
			exempt[i].Masqueraded = false
		}
		prod, other := n.pod(t, "prod/one"), n.pod(t, "two")
		prod.FirstPackets(within(t), t, n.Topology, exempt)
		n.firstPackets(t, other)
		n.end(t, prod, other)
		record := string(assert.Must(os.ReadFile(n.Path(dataDir + "/record.json")))(t))
		for _, a := range prod.Addrs {
			if strings.Contains(record, a.String()) {
				t.Errorf("after DEL %s is on record: %s", a, record)
			}
		}
	})
}

// TestNamespaceBeforeTheEntry: pods that started before the entry was in the conflist have the verdict of their namespace,
// by the cache of the runtime, from when the entry is there until they end.
func TestNamespaceBeforeTheEntry(t *testing.T) {
	onEvery(t, forms()[:1], func(t *testing.T, n *criNode) {
		n.conflist(t, bridge())
		n.ready(t, true)
		prod, other := n.pod(t, "prod/one"), n.pod(t, "two")
		n.reconciler(t, programDir, "--resync-interval", "10m")
		keys := prefixes()
		keys["nonMasqueradeNamespaces"] = []string{"prod"}
		n.conflist(t, bridge(), n.entry(keys))
		exempts := func() bool { return strings.Contains(n.rules(t), prod.Addrs[0].String()) }
		until(t, 10*time.Second, "the exemption", exempts)
		exempt := containerd.Destinations()
		for i := range exempt {
			exempt[i].Masqueraded = false
		}
		prod.FirstPackets(within(t), t, n.Topology, exempt)
		n.firstPackets(t, other)
		n.end(t, prod, other)
		until(t, 10*time.Second, "the end of the exemption", func() bool { return !exempts() })
	})
}

// call is a call of a plugin, as recorded by a script in its place.
type call struct {
	verb       string
	netns      bool
	prevResult bool
	prefixes   int // the number of nonMasqueradeCIDRs in the entry
}

// spy replaces the plugin by a script that records the call and executes the plugin.
func (n *node) spy(t *testing.T) (calls func() []call) {
	t.Helper()
	const log = "/var/log/calls"
	path := n.Path(binDir + "/ip-masq")
	must(t, os.Rename(path, path+".real"))
	must(t, os.MkdirAll(n.Path(log), 0o755))
	must(t, n.WriteFile(binDir+"/ip-masq", fmt.Sprintf(`#!/bin/sh
PATH=/usr/bin:/bin
conf=$(cat)
file=%s/$(date +%%s.%%N)
printf '{"verb":"%%s","netns":"%%s","conf":%%s}' "$CNI_COMMAND" "$CNI_NETNS" "$conf" >$file.part
mv $file.part $file.json
export PATH=%s
printf %%s "$conf" | exec %s/ip-masq.real
`, log, programDir, binDir), 0o755))
	return func() []call {
		t.Helper()
		files := assert.Must(filepath.Glob(n.Path(log) + "/*.json"))(t)
		slices.Sort(files)
		var all []call
		for _, file := range files {
			text := assert.Must(os.ReadFile(file))(t)
			must(t, os.Remove(file))
			var noted struct {
				Verb, Netns string
				Conf        struct {
					PrevResult         json.RawMessage `json:"prevResult"`
					NonMasqueradeCIDRs []string        `json:"nonMasqueradeCIDRs"`
				}
			}
			if err := json.Unmarshal(text, &noted); err != nil {
				t.Fatalf("%v: %s", err, text)
			}
			all = append(all, call{noted.Verb, noted.Netns != "", len(noted.Conf.PrevResult) > 0, len(noted.Conf.NonMasqueradeCIDRs)})
		}
		return all
	}
}

// TestCalls checks which calls the runtimes make of a plugin, and that ip-masq answers each of
// them.
func TestCalls(t *testing.T) {
	onEvery(t, forms()[:1], func(t *testing.T, n *criNode) {
		calls := n.spy(t)
		n.conflist(t, bridge(), n.entry(prefixes()))
		n.ready(t, true)
		status := len(calls())
		if asks := n.version == "1.1.0"; asks != (status > 0) {
			t.Errorf("STATUS was called %d times", status)
		}
		p := n.pod(t, "pod")
		n.verdicts(t, n.adopt(t, p.Netns), p.Addrs)
		must(t, p.Stop(within(t)))
		must(t, p.Remove(within(t)))
		got := slices.DeleteFunc(calls(), func(c call) bool { return c.verb == "STATUS" }) // whose time is not defined
		want := []call{{"ADD", true, true, 4}, {"DEL", true, true, 4}, {"DEL", false, false, 4}}
		if !slices.Equal(got, want) {
			t.Errorf("calls (verb, netns, prevResult, prefixes): %v, want %v", got, want)
		}
		n.wantAttachments(t, 0)
	})
}

// TestFailingAdd checks that the runtime's error has the wrong key and the remedy, and that pods
// start once the entry is repaired.
func TestFailingAdd(t *testing.T) {
	onEvery(t, forms()[:1], func(t *testing.T, n *criNode) {
		n.conflist(t, bridge(), n.entry(object{"nonMasqueradeCIDRs": []string{"10.0.1.24/24"}}))
		// containerd 2 calls STATUS, which reports the error before any ADD.
		if n.version == "1.1.0" {
			assert.Contains(t, "NetworkReady", n.ready(t, false).Message, "nonMasqueradeCIDRs[0]: 10.0.1.24/24")
		} else {
			n.ready(t, true)
		}
		p, err := n.RunPod(within(t), "pod")
		if err == nil {
			t.Fatalf("the pod runs: %v", p.Addrs)
		}
		assert.ErrorContains(t, err, `plugin type=\"ip-masq\"`, "nonMasqueradeCIDRs[0]: 10.0.1.24/24")
		n.wantAttachments(t, 0)
		if got := n.rules(t); strings.Contains(got, "IP-MASQ-AGENT") {
			t.Errorf("rules:\n%s", got)
		}
		n.conflist(t, bridge(), n.entry(prefixes()))
		n.ready(t, true)
		p = n.pod(t, "pod")
		n.firstPackets(t, p)
		n.end(t, p)
	})
}

// criNode is a node with a containerd.
type criNode struct {
	*node
	*containerd.Runtime
}

// runtimes returns the containerds, each with the cniVersion of its conflists.
func runtimes() []struct{ name, programs, version string } {
	return []struct{ name, programs, version string }{
		{"containerd-1.6", containerd.Debian, "1.0.0"},
		{"containerd-2.4", "", "1.1.0"},
	}
}

// onEvery runs a test on a node of each runtime with each of the backends.
func onEvery(t *testing.T, forms []form, test func(t *testing.T, n *criNode)) {
	t.Helper()
	for _, r := range runtimes() {
		for _, f := range forms {
			t.Run(r.name+"/"+f.name, func(t *testing.T) {
				n := newNode(t, f)
				n.version = r.version
				runtime := containerd.New(t, n.Machine, containerd.Options{
					Programs: r.programs, Env: []string{"PATH=" + programDir}, Args: []string{"--log-level", "debug"},
				})
				if !strings.HasPrefix(runtime.Version, strings.TrimPrefix(r.name, "containerd-")+".") {
					t.Fatalf("the version is %s", runtime.Version)
				}
				test(t, &criNode{n, runtime})
			})
		}
	}
}

// ready waits until the network has the wanted readiness.
func (n *criNode) ready(t *testing.T, want bool) containerd.Condition {
	t.Helper()
	var last containerd.Condition
	until(t, 10*time.Second, "network ready", func() bool {
		last = n.NetworkReady(within(t), t)
		return last.Status == want
	})
	return last
}

// pod starts a pod and fails the test if that fails.
func (n *criNode) pod(t *testing.T, name string) *containerd.Pod {
	t.Helper()
	return assert.Must(n.RunPod(within(t), name))(t)
}

// firstPackets checks the first packets of a container to the destinations of the policy.
func (n *criNode) firstPackets(t *testing.T, p *containerd.Pod) {
	t.Helper()
	p.FirstPackets(within(t), t, n.Topology, containerd.Destinations())
}

// end stops and removes pods; the runtime calls DEL for both.
func (n *criNode) end(t *testing.T, pods ...*containerd.Pod) {
	t.Helper()
	for _, p := range pods {
		must(t, p.Stop(within(t)))
		must(t, p.Remove(within(t)))
	}
}

// TestRestart stops, kills and restarts the runtime. It checks that pods keep sending with the
// right verdict meanwhile, and end as usual.
func TestRestart(t *testing.T) {
	onEvery(t, forms()[:1], func(t *testing.T, n *criNode) {
		n.conflist(t, bridge(), n.entry(prefixes()))
		n.ready(t, true)
		old := n.pod(t, "old")
		args := []string{"load", "5ms"}
		for _, d := range containerd.Destinations() {
			args = append(args, "udp:"+d.To)
		}
		load := old.Run(within(t), t, "load", containerd.PodImage, args...)
		load.Await(within(t), t, 20)
		must(t, n.Restart(within(t)))
		middle := n.pod(t, "middle")
		n.firstPackets(t, middle)
		must(t, n.Kill())
		must(t, n.Start(within(t)))
		n.ready(t, true)
		young := n.pod(t, "young")
		n.firstPackets(t, young)
		n.wantAttachments(t, 3)
		n.wantLoad(t, load, old, 100)
		n.end(t, old, middle, young)
		n.wantAttachments(t, 0)
	})
}

// wantLoad compares the packets of a load with the policy.
func (n *criNode) wantLoad(t *testing.T, load *containerd.Container, p *containerd.Pod, atLeast int) {
	t.Helper()
	lines := load.Await(within(t), t, atLeast)
	for _, line := range lines {
		fields := strings.Fields(line) // time, destination, name, source
		if len(fields) != 4 {
			t.Errorf("load: %s", line)
			continue
		}
		for _, d := range containerd.Destinations() {
			if "udp:"+d.To != fields[1] {
				continue
			}
			source, err := netip.ParseAddrPort(fields[3])
			if err != nil || source.Addr() != d.Source(n.Topology, p.Addrs) {
				t.Errorf("load: %s, want %s", line, d.Source(n.Topology, p.Addrs))
			}
		}
	}
	t.Logf("%d packets", len(lines))
}
