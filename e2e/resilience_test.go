// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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
			says = []string{"chain THEIRS (ipv4)", "belongs to another program", "choose another masqChain, or remove the chain"}
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

// TestDamagedDocumentOfAnotherNetwork checks that beside the damaged document of another network an ADD passes and leaves all
// rules as they are, creates a chain that does not exist, and that the network's own ADD writes the document again.
func TestDamagedDocumentOfAnotherNetwork(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		keys := object{"nonMasqueradeCIDRs": []string{"50.0.0.0/8"}, "guard": "drop"}
		conf := n.conf(t, "podnet", nil)
		n.standardConflist(t, "othernet", keys)
		n.addAndCheck(t, conf)
		n.addAndCheck(t, n.conf(t, "othernet", keys))
		path, rules := n.document(t, "othernet"), n.ruleset(t)
		damage := func() { must(t, os.WriteFile(path, []byte(`{"schema":`), 0o600)) }

		damage()
		n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
		n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0, path)
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, path)
		if n.load(t).Find(networkID("othernet")) != nil {
			t.Error("the ADD of another network wrote the document")
		}
		n.addAndCheck(t, n.conf(t, "othernet", keys))
		if n.load(t).Find(networkID("othernet")) == nil || n.ruleset(t) != rules {
			t.Errorf("the document was not written again, or the rules are not those of before:\n%s", cmp.Diff(rules, n.ruleset(t)))
		}

		must(t, os.Remove(filepath.Join(n.own("/etc/cni/net.d"), "10-othernet.conflist")))
		damage()
		wantKept := func(conf string) {
			t.Helper()
			n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
			n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, path)
			n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0, path)
			if readFile(t, path); !strings.Contains(n.ruleset(t), "50.0.0.0/8") {
				t.Errorf("the rules of the network have gone:\n%s", cmp.Diff(rules, n.ruleset(t)))
			}
		}
		wantKept(conf)
		wantSame(t, "rules", n.ruleset(t), rules)
		wantKept(n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"60.0.0.0/8"}}))
		wantKept(n.conf(t, "third", object{"masqChain": "THIRD"}))
		if now := n.ruleset(t); !strings.Contains(now, "THIRD") {
			t.Errorf("a new chain was not created:\n%s", now)
		}
		n.flush(t)
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, path)
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
	}{{"ADD", 11, busy}, {"DEL", 0, busy}, {"GC", 0, busy}, {"CHECK", 101, []string{"missing chain"}}}
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
