// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"encoding/json"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// crioPod is a network namespace that is attached to a node's network.
type crioPod struct {
	*topology.Host
	name  string
	addrs []netip.Addr
}

// crio calls the plugins as CRI-O does.
func (n *node) crio(t *testing.T, args ...string) (output string, code int) {
	t.Helper()
	program := filepath.Join(topology.Must(topology.BinDir())(t), "cni/crioverbs")
	args = slices.Insert(args, 1, conflistDir+"/10-pods.conflist")
	return n.ended(t, []string{"PATH=" + programDir, "CNI_PATH=" + binDir}, program, args...)
}

func (n *node) crioMust(t *testing.T, args ...string) string {
	t.Helper()
	output, code := n.crio(t, args...)
	if code != 0 {
		t.Fatalf("%v: exit code %d: %s", args, code, output)
	}
	return output
}

// crioRun attaches a pod with ADD and CHECK.
func (n *node) crioRun(t *testing.T, name string) *crioPod {
	t.Helper()
	if output, code := n.ended(t, nil, "ip", "netns", "add", name); code != 0 {
		t.Fatal(output)
	}
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

func (n *node) crioStop(t *testing.T, p *crioPod) {
	t.Helper()
	n.crioMust(t, "stop", p.name, "/run/netns/"+p.name)
}

// TestCRIO calls the plugins in CRI-O's order: STATUS, GC at its start, CHECK right after ADD, and
// DEL with the conflist of the ADD, even if it has changed.
func TestCRIO(t *testing.T) {
	for _, f := range forms() {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			n.version = "1.1.0"
			calls := n.spy(t)
			wantCalls := func(want ...string) {
				t.Helper()
				var got []string
				for _, c := range calls() {
					got = append(got, c.verb)
				}
				if !slices.Equal(got, want) {
					t.Errorf("calls: %v, want %v", got, want)
				}
			}
			n.conflist(t, bridge(), n.entry(prefixes()))
			n.crioMust(t, "start")
			wantCalls("STATUS", "GC")
			one := n.crioRun(t, "one")
			n.crioRun(t, "two") // ends while CRI-O is stopped, below
			wantCalls("ADD", "CHECK", "ADD", "CHECK")
			n.verdicts(t, one.Host, one.addrs)
			n.wantAttachments(t, 2)

			// The administrator exempts one more prefix; then a pod ends whose DEL has the earlier
			// entry. That DEL changes no rule.
			more := prefixes()
			more["nonMasqueradeCIDRs"] = append(more["nonMasqueradeCIDRs"].([]string), "198.18.0.0/15")
			n.conflist(t, bridge(), n.entry(more))
			three := n.crioRun(t, "three")
			exempt := func() {
				t.Helper()
				n.verdicts(t, three.Host, three.addrs)
				seen := topology.Must(three.SendUDP(netip.MustParseAddrPort("198.18.0.1:7")))(t)
				if !slices.Contains(three.addrs, seen.Source.Addr()) {
					t.Errorf("198.18.0.1 saw %s, want one of %s", seen.Source, three.addrs)
				}
			}
			exempt()
			n.crioStop(t, one)
			n.crioStop(t, one) // the runtime may repeat DEL
			exempt()
			wantCalls("ADD", "CHECK", "DEL", "DEL")
			n.wantAttachments(t, 2)

			// A pod ends while CRI-O is stopped: only GC at CRI-O's start reports it.
			n.crioMust(t, "start", "three")
			n.wantAttachments(t, 1)
			exempt()
			if got := calls(); len(got) < 2 || got[0].verb != "STATUS" || got[len(got)-1].verb != "GC" {
				t.Errorf("calls: %v", got)
			}

			// The conflist no longer has the plugin entry, but DEL is still called.
			n.conflist(t, bridge())
			four := n.crioRun(t, "four")
			wantCalls()
			n.crioStop(t, three)
			n.crioStop(t, four)
			wantCalls("DEL")
			n.wantAttachments(t, 0)
		})
	}
}

// TestCRIOFails checks the errors that CRI-O gets for an invalid entry.
func TestCRIOFails(t *testing.T) {
	n := newNode(t, forms()[0])
	n.version = "1.1.0"
	n.conflist(t, bridge(), n.entry(object{"nonMasqueradeCIDRs": []string{"10.0.1.24/24"}}))
	if output, code := n.crio(t, "start"); code == 0 {
		t.Error("STATUS is fine")
	} else {
		wantSays(t, output, "nonMasqueradeCIDRs[0]: 10.0.1.24/24 has host bits set; did you mean 10.0.1.0/24?")
	}
	if output, code := n.ended(t, nil, "ip", "netns", "add", "pod"); code != 0 {
		t.Fatal(output)
	}
	if output, code := n.crio(t, "run", "pod", "/run/netns/pod"); code == 0 {
		t.Error("ADD is fine")
	} else {
		wantSays(t, output, "10.0.1.24/24 has host bits set")
	}
	// A failed ADD is not cached, so DEL gets the current conflist.
	n.crioMust(t, "stop", "pod", "/run/netns/pod")
	n.wantAttachments(t, 0)
}
