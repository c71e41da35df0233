// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package mainplugins

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// restarts is how often a test restarts a main CNI plugin's program.
const restarts = 3

// TestWriters installs ip-masq beside each main CNI plugin, whose program is then restarted, and
// uninstalls it. It checks the plugin entry, the packets of pods that start before, in between and
// after, and what doctor finds.
func TestWriters(t *testing.T) {
	for _, w := range Writers() {
		t.Run(w.Name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, w.version(), w.Needs)
			n.beside(t, w.File, func() { must(t, w.Start(n.Path(confDir))) })
		})
	}
}

// version returns the cniVersion of the conflist.
func (w Writer) version() string {
	_, after, _ := strings.Cut(w.Conflist, `"cniVersion": "`)
	version, _, _ := strings.Cut(after, `"`)
	return version
}

// beside installs ip-masq beside a main CNI plugin, restarts the program that writes the conflist,
// and uninstalls ip-masq. doctor may have these findings.
func (n *node) beside(t *testing.T, file string, start func(), findings ...string) {
	t.Helper()
	start()
	conflist, err := os.ReadFile(n.Path(filepath.Join(confDir, file)))
	must(t, err)
	n.pod(t, "before", false)
	n.run(t)
	n.untilEntry(t, file)
	n.untilReady(t)
	n.untilHealthy(t, findings...)
	n.pod(t, "between", true)
	for i := range restarts {
		start()
		t.Logf("the entry is back after %s", n.untilEntry(t, file).Round(time.Millisecond))
		n.untilReady(t)
		n.pod(t, fmt.Sprint("restart", i), true)
	}
	n.untilHealthy(t, findings...)
	n.packets(t, true)
	must(t, n.reconciler.Stop(10*time.Second))
	if log := n.reconciler.Output(); strings.Contains(log, "level=ERROR") {
		t.Errorf("the reconciler logged an error:\n%s", log)
	}
	if output, code := n.command(t, "uninstall"); code != 0 {
		t.Errorf("uninstall: exit code %d: %s", code, output)
	}
	n.wantGone(t, file, string(conflist))
	n.packets(t, false)
	n.endPods(t)
	n.pod(t, "after", false)
	n.endPods(t)
}

// The rules of kindnet (kubernetes-sigs/kindnet@6ed36f640ca2:pkg/masq/masq.go) and of kindnetd
// (kubernetes-sigs/kind@23d571e598ae:images/kindnetd/cmd/kindnetd/masq.go).
const (
	kindnetRules = `table inet kindnet-ipmasq {
	set noMasqV4 { type ipv4_addr; flags interval; auto-merge; elements = { 10.244.0.0/24 }; }
	chain postrouting {
		type nat hook postrouting priority srcnat - 10;
		ct state established,related accept
		fib daddr type local accept
		ip daddr @noMasqV4 accept
		masquerade
	}
}
`
	kindnetdRules = `*nat
:KIND-MASQ-AGENT - [0:0]
-A POSTROUTING -m comment --comment "kind-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom KIND-MASQ-AGENT chain" -m addrtype ! --dst-type LOCAL -j KIND-MASQ-AGENT
-A KIND-MASQ-AGENT -m comment --comment "kind-masq-agent: local traffic is not subject to MASQUERADE" -d 10.244.0.0/16 -j RETURN
-A KIND-MASQ-AGENT -m comment --comment "kind-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE
COMMIT
`
)

// TestKindnetMasquerades adds the rules of kindnet and kindnetd, which masquerade what the policy
// exempts. It checks that doctor names the remedy, and that enforceExempt holds against kindnetd.
func TestKindnetMasquerades(t *testing.T) {
	t.Parallel()
	w := Writers()[0]
	n := newNode(t, w.version(), w.Needs)
	must(t, w.Start(n.Path(confDir)))
	n.run(t)
	n.untilEntry(t, w.File)
	n.untilReady(t)
	n.pod(t, "pod", true)
	exempt := func(want bool) {
		t.Helper()
		seen, err := n.pods[0].host.SendUDP(netip.MustParseAddrPort("10.200.0.1:7"))
		if err != nil || slices.Contains(n.pods[0].Addrs, seen.Source.Addr()) != want {
			t.Errorf("the pod was seen as %s, exempt %t: %v", seen.Source, want, err)
		}
	}
	load := func(rules string, program ...string) {
		t.Helper()
		c := n.Command(within(t), program[0], program[1:]...)
		c.Stdin = strings.NewReader(rules)
		if output, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%q: %v\n%s", program, err, output)
		}
	}
	load(kindnetRules, "nft", "-f", "-")
	exempt(false)
	output, _ := n.command(t, "doctor")
	wantSays(t, output, "foreign-masquerade", "table kindnet-ipmasq", "--masquerading=false")
	load("", "nft", "delete", "table", "inet", "kindnet-ipmasq")
	exempt(true)
	n.untilHealthy(t)

	load(kindnetdRules, "iptables-nft-restore", "--noflush")
	exempt(false)
	output, _ = n.command(t, "doctor")
	wantSays(t, output, "foreign-masquerade", "KIND-MASQ-AGENT", "enforceExempt")
	must(t, n.WriteFile(entryFile, strings.Replace(entry, "{", `{"enforceExempt": true, `, 1), 0o644))
	must(t, w.Start(n.Path(confDir))) // the entry is inserted again, as it is now
	n.untilEntry(t, w.File)
	n.untilReady(t)
	n.untilHealthy(t)
	n.packets(t, true)
	n.endPods(t)
}
