// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// reconcile runs a command of the reconciler on the node.
func (n *node) reconcile(t *testing.T, args ...string) (output string, code int) {
	t.Helper()
	program := filepath.Join(topology.BinDir(t), "ip-masq-reconciler")
	return n.ended(t, []string{"PATH=" + programDir}, program, args...)
}

// bare removes ip-masq from the node except for the file with the entry.
func (n *node) bare(t *testing.T) {
	t.Helper()
	must(t, os.Remove(n.Path(binDir+"/ip-masq")))
	text := assert.Must(json.Marshal(n.entry(prefixes())))(t)
	must(t, n.WriteFile("/etc/ip-masq/entry.json", string(text), 0o644))
	n.conflist(t, bridge())
}

// install runs install twice and checks that the second run changes nothing.
func (n *node) install(t *testing.T) {
	t.Helper()
	plugin := filepath.Join(topology.BinDir(t), "ip-masq")
	for range 2 {
		if output, code := n.reconcile(t, "install", "--plugin", plugin); code != 0 {
			t.Fatalf("install: exit code %d: %s", code, output)
		}
	}
}

// uninstall runs uninstall, which must have this exit code.
func (n *node) uninstall(t *testing.T, want int) {
	t.Helper()
	if output, code := n.reconcile(t, "uninstall"); code != want {
		t.Errorf("uninstall: exit code %d, want %d: %s", code, want, output)
	}
}

// wantGone checks that nothing of ip-masq remains and the conflist is the main CNI plugin's.
func (n *node) wantGone(t *testing.T) {
	t.Helper()
	text := assert.Must(os.ReadFile(n.Path(conflistDir + "/10-pods.conflist")))(t)
	if got, want := string(text), n.list(t, bridge()); got != want {
		t.Errorf("the conflist is\n%s\nwant\n%s", got, want)
	}
	for _, path := range []string{binDir + "/ip-masq", dataDir} {
		if _, err := os.Lstat(n.Path(path)); !os.IsNotExist(err) {
			t.Errorf("%s: %v, want it gone", path, err)
		}
	}
	if rules := n.rules(t); strings.Contains(rules, "ip-masq") || strings.Contains(rules, "IP-MASQ-AGENT") {
		t.Errorf("rules:\n%s", rules)
	}
}

// wantAlone checks that a pod's packets are not masqueraded.
func (n *node) wantAlone(t *testing.T, h *topology.Host, addrs []netip.Addr) {
	t.Helper()
	seen := assert.Must(h.SendUDP(netip.MustParseAddrPort("203.0.113.11:7")))(t)
	if !slices.Contains(addrs, seen.Source.Addr()) {
		t.Errorf("without us the pod was seen as %s, want one of %s", seen.Source, addrs)
	}
}

// TestInstall installs and uninstalls the plugin while pods run. It checks that these pods end and
// others start.
func TestInstall(t *testing.T) {
	onEvery(t, forms()[:2], func(t *testing.T, n *criNode) {
		n.bare(t)
		n.ready(t, true)
		old := n.pod(t, "old")
		n.install(t)
		n.ready(t, true)
		ours := n.pod(t, "ours")
		n.firstPackets(t, ours)
		n.wantAttachments(t, 1)
		n.uninstall(t, 0)
		n.wantGone(t)
		n.ready(t, true)
		n.wantAlone(t, n.adopt(t, ours.Netns), ours.Addrs)
		n.end(t, old, ours)
		young := n.pod(t, "young")
		n.wantAlone(t, n.adopt(t, young.Netns), young.Addrs)
		n.end(t, young)
		n.wantGone(t)
	})
}

// TestUninstallWaits checks that the plugin stays while a runtime needs it for DEL: runtimes use
// the conflist of the ADD. It checks that CRI-O, which loads no conflist with a missing plugin, finds
// its network at any time.
func TestUninstallWaits(t *testing.T) {
	waits := func(t *testing.T, n *node, h *topology.Host, addrs []netip.Addr, end func()) {
		t.Helper()
		n.verdicts(t, h, addrs)
		n.uninstall(t, 1)
		n.verdicts(t, h, addrs)
		end()
		n.uninstall(t, 0)
		n.wantGone(t)
	}
	for name, end := range map[string]func(*testing.T, *node, *crioPod){
		"cri-o": func(t *testing.T, n *node, p *crioPod) { n.crioStop(t, p) },
		// GC sends DEL with the present conflist, so not to the plugin.
		"cri-o restart": func(t *testing.T, n *node, p *crioPod) {
			n.netns(t, "delete", p.name)
			n.crioMust(t, "start")
			n.wantAttachments(t, 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, forms()[0])
			n.bare(t)
			done := n.crioLoads(t)
			defer done()
			n.install(t)
			p := n.crioRun(t, "pod")
			waits(t, n, p.Host, p.addrs, func() { end(t, n, p) })
			young := n.crioRun(t, "young")
			n.wantAlone(t, young.Host, young.addrs)
		})
	}
	t.Run("podman", func(t *testing.T) {
		n := newNode(t, forms()[0])
		n.bare(t)
		n.install(t)
		podman := n.podman(t)
		h, addrs := n.podmanRun(t, podman, "pod")
		waits(t, n, h, addrs, func() { n.podmanEnd(t, podman, "pod") })
		h, addrs = n.podmanRun(t, podman, "young")
		n.wantAlone(t, h, addrs)
		n.podmanEnd(t, podman, "young")
	})
}
