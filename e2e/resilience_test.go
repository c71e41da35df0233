// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// The tests of this file check that a fault of another source, network or program does not fail
// the ADDs of a valid entry.

// TestErrorOfAnotherNetwork checks that ADD succeeds while another network's chain cannot be made:
// with nftables because iptables is missing, with iptables because the chain belongs to another
// program.
func TestErrorOfAnotherNetwork(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		says := []string{"install iptables"}
		if n.backend.variant != "" {
			n.tool(t, "iptables", "-t", "nat", "-N", "THEIRS")
			n.tool(t, "iptables", "-t", "nat", "-A", "THEIRS", "-j", "ACCEPT")
			says = []string{"chain THEIRS (ipv4)", "belongs to another program", "delete it, or choose another masqChain"}
		}
		n.storeSource(t, policy.Source{ID: networkID("othernet"), Order: 1,
			Policy: policy.SourcePolicy{Chain: "THEIRS", Backend: policy.IPTables}})
		conf := n.conf(t, "podnet", nil)
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, says...)
		n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
		n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
		before := n.ruleset(t)
		for range 2 {
			n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
			n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0)
		}
		theirs := n.conf(t, "othernet", object{"masqChain": "THEIRS", "backend": "iptables"})
		n.invoke(t, invocation{verb: "ADD", conf: theirs}).want(t, 100, says...)
		n.invoke(t, invocation{verb: "STATUS", conf: theirs}).want(t, 50, says...)
		wantSame(t, "rules", n.ruleset(t), before)
		n.flush(t)
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
		n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
	})
}

// TestBusyLock checks the verbs while another process holds the lock for longer than the plugin
// waits.
func TestBusyLock(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	conf := n.conf(t, "podnet", nil)
	n.addAndCheck(t, conf)
	n.flush(t)
	before := n.ruleset(t)
	release := n.holdLock(t)
	busy := []string{filepath.Join(n.dataDir, "lock"), "another process holds it", "try again"}
	cases := []struct {
		verb string
		code uint
		says []string
	}{{"ADD", 11, busy}, {"DEL", 0, busy}, {"GC", 0, busy}, {"STATUS", 50, busy}, {"CHECK", 101, []string{"missing chain"}}}
	var requests []invocation
	for _, c := range cases {
		requests = append(requests, invocation{verb: c.verb, conf: conf})
	}
	for i, a := range n.invokeAll(t, requests...) {
		a.want(t, cases[i].code, cases[i].says...)
		if a.took < 9*time.Second {
			t.Errorf("%s took %v, want about 10s", cases[i].verb, a.took)
		}
	}
	wantSame(t, "rules", n.ruleset(t), before)
	release()
	n.addAndCheck(t, conf).noWarnings(t)
}
