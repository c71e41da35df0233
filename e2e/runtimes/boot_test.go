// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// TestOwnConflistAtBoot boots a node whose main CNI plugin writes its file anew before a pod starts. With ip-masq's own
// conflist the first packet of the first pod has its verdict, although no reconciler has run.
func TestOwnConflistAtBoot(t *testing.T) {
	onEvery(t, forms(), func(t *testing.T, n *criNode) {
		n.bare(t)
		plugin := filepath.Join(topology.Must(topology.BinDir())(t), "ip-masq")
		if output, code := n.reconcile(t, "install", "--plugin", plugin, "--conflist-own"); code != 0 || !strings.Contains(output, "05-ip-masq.conflist") {
			t.Fatalf("install: exit code %d: %s", code, output)
		}
		n.ready(t, true)
		before := n.pod(t, "before")
		n.firstPackets(t, before)
		n.end(t, before)
		for name, main := range map[string]object{"same": {}, "another": {"hairpinMode": true}} {
			for key, value := range bridge() {
				main[key] = value
			}
			must(t, n.Stop())
			n.flush(t)
			n.conflist(t, main)
			must(t, n.Start(within(t)))
			n.ready(t, true)
			first := n.pod(t, name)
			n.firstPackets(t, first)
			n.end(t, first)
			text := string(topology.Must(os.ReadFile(n.Path(conflistDir + "/10-pods.conflist")))(t))
			if text != n.list(t, main) {
				t.Errorf("the main CNI plugin's file is\n%s", text)
			}
		}
		n.conflist(t, bridge(), object{"type": "loopback"})
		if output, code := n.reconcile(t, "check"); code != 3 || !strings.Contains(output, "conflist-stale") {
			t.Errorf("check of a stale copy: exit code %d: %s", code, output)
		}
		n.conflist(t, bridge())
		if output, code := n.reconcile(t, "uninstall"); code != 0 {
			t.Errorf("uninstall: exit code %d: %s", code, output)
		}
		n.wantGone(t)
		if _, err := os.Lstat(n.Path(conflistDir + "/05-ip-masq.conflist")); !os.IsNotExist(err) {
			t.Errorf("ip-masq's own conflist: %v, want it gone", err)
		}
		after := n.pod(t, "after")
		n.wantAlone(t, n.adopt(t, after.Netns), after.Addrs)
		n.end(t, after)
	})
}
