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
		topology.Must(two.Run(within(t), "serve", containerd.PodImage, "serve", "7", "two"))(t)
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
		if err := prod.FirstPackets(within(t), n.Topology, exempt); err != nil {
			t.Error(err)
		}
		n.firstPackets(t, other)
		n.end(t, prod, other)
		record := string(topology.Must(os.ReadFile(n.Path(dataDir + "/record.json")))(t))
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
		if err := prod.FirstPackets(within(t), n.Topology, exempt); err != nil {
			t.Error(err)
		}
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
		files, err := filepath.Glob(n.Path(log) + "/*.json")
		must(t, err)
		slices.Sort(files)
		var all []call
		for _, file := range files {
			text, err := os.ReadFile(file)
			must(t, err)
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

// but returns the calls without those of a verb whose time is not defined.
func but(calls []call, verb string) []call {
	return slices.DeleteFunc(calls, func(c call) bool { return c.verb == verb })
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
		got, want := but(calls(), "STATUS"), []call{{"ADD", true, true, 4}, {"DEL", true, true, 4}, {"DEL", false, false, 4}}
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
			wantSays(t, n.ready(t, false).Message, "nonMasqueradeCIDRs[0]: 10.0.1.24/24")
		} else {
			n.ready(t, true)
		}
		p, err := n.RunPod(within(t), "pod")
		if err == nil {
			t.Fatalf("the pod runs: %v", p.Addrs)
		}
		wantSays(t, err.Error(), `plugin type=\"ip-masq\"`, "nonMasqueradeCIDRs[0]: 10.0.1.24/24")
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
