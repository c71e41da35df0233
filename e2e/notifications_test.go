// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// TestNotifications changes owned rules in ways that notifications of nf_tables hardly show, or not at all. The
// reconciler, which reads the rules only after a commit that touched them, has to notice.
func TestNotifications(t *testing.T) {
	third := "table ip other { chain c { }; }\n" + strings.Repeat("add rule ip other c ip daddr 1.2.3.4 counter accept\n", 30)
	for i, f := range backends()[:2] {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel() // waits most of the time
			w := newTamperNode(t, f)
			for _, tc := range []struct {
				name, script string
				backend      int
				undo         string // of what the reconciler reports, but does not repair
			}{
				{"between third-party rules", third + "flush chain ip ip-masq postrouting\n" + third, 0, ""},
				{"third-party table becomes the owned one", "delete table ip ip-masq\n" + strings.ReplaceAll(third, "other", "ip-masq"), 0, ""},
				{"dormant", "add table ip ip-masq { flags dormant; }\n", 0, ""},
				{"chain renamed", "rename chain ip ip-masq masq-IP-MASQ-AGENT x\n", 0, ""},
				{"chain renamed", "rename chain ip nat IP-MASQ-AGENT OTHER\n", 1, ""},
				{"between third-party rules", third + "flush chain ip nat IP-MASQ-AGENT\n" + third, 1, ""},
				{"policy of the base chain", "add chain ip nat POSTROUTING { policy drop; }\n", 1, "add chain ip nat POSTROUTING { policy accept; }\n"},
				{"dormant table", "add table ip6 nat { flags dormant; }\n", 1, "add table ip6 nat\n"},
			} {
				if tc.backend != i {
					continue
				}
				count, repairs := w.untilIdle(t, 100*time.Millisecond), w.metric(t, "drift_repairs_total")
				w.feed(t, tc.script, "nft", "-f", "-")
				if tc.undo != "" {
					w.until(t, "not ready: "+tc.name, func() bool { code, _ := w.ready(); return code != 200 })
					w.feed(t, tc.undo, "nft", "-f", "-")
				} else {
					w.until(t, "repair: "+tc.name, func() bool {
						all := w.Since(count)
						return len(all) > 1 && w.isReconcilerCommit(all[len(all)-1]) && w.metric(t, "drift_repairs_total") > repairs // of several commits
					})
				}
				w.until(t, "ready: "+tc.name, func() bool { code, _ := w.ready(); return code == 200 })
				w.checkVerdicts(t)
				w.feed(t, "table ip other\ndelete table ip other\n", "nft", "-f", "-")
			}
		})
	}
}

// TestLostNotifications: the reconciler does not run while there are more commits than its socket holds. Among those that
// it lost, one changed its rules.
func TestLostNotifications(t *testing.T) {
	const commits = 30_000
	w := newTamperNode(t, backends()[0])
	w.untilIdle(t, 100*time.Millisecond)
	w.signal(t, syscall.SIGSTOP)
	must(t, w.Node.Do(func() error {
		var c nfnetlink.Conn
		defer func() { must(t, c.Close()) }()
		for i := range commits {
			var b nfnetlink.Batch
			if b.AddTable(nfnetlink.IPv4, "other"); i%2 == 1 {
				b.DeleteTable(nfnetlink.IPv4, "other")
			}
			if i == commits-10 {
				b.FlushChain(nfnetlink.IPv4, "ip-masq", "postrouting")
			}
			if err := c.Commit(&b); err != nil {
				return err
			}
		}
		return nil
	}))
	count := w.Count()
	w.signal(t, syscall.SIGCONT)
	w.until(t, "repair", func() bool {
		all := w.Since(count)
		return len(all) > 0 && w.isReconcilerCommit(all[len(all)-1])
	})
	w.checkVerdicts(t)
}

// TestElementsThatExpire replaces the owned sets by sets whose elements expire after a second,
// which makes no commit. It checks that ADD and CHECK do not accept these sets, and that later ADDs
// do not trust the verification cache.
func TestElementsThatExpire(t *testing.T) {
	t.Parallel()
	const expire = time.Second
	n := newNode(t, backends()[0])
	keys := dualStack(nil)
	n.conflist(t, "podnet", keys)
	pods, conf := onlyPod(n.pod(t, "podnet")), n.conf(t, "podnet", keys)
	for i, family := range families() {
		n.feed(t, strings.NewReplacer("FAM", family[1], "TYPE", []string{"ipv4_addr", "ipv6_addr"}[i],
			"ELEMENTS", []string{"10.0.0.0/8, 169.254.0.0/16, 224.0.0.0/4, 255.255.255.255", "fd00::/8, fe80::/10, ff00::/8"}[i]).Replace(
			`add set FAM ip-masq exempt-IP-MASQ-AGENT.2 { type TYPE; flags interval, timeout; timeout 1s; elements = { ELEMENTS } }
			flush chain FAM ip-masq masq-IP-MASQ-AGENT
			add rule FAM ip-masq masq-IP-MASQ-AGENT FAM daddr @exempt-IP-MASQ-AGENT.2 counter return
			add rule FAM ip-masq masq-IP-MASQ-AGENT counter masquerade fully-random
			delete set FAM ip-masq exempt-IP-MASQ-AGENT
			`), "nft", "-f", "-")
	}
	n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 101, `set "exempt-IP-MASQ-AGENT.2"`)
	for range 3 {
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
	}
	time.Sleep(expire + expire/2)
	n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
	n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
	pods.verdicts(t, n, false, flows{"pod": "10.9.9.9 fd00:9::9"})
	pods.verdicts(t, n, true, flows{"pod": "1.2.3.4 2001:db8:5::5"})
}
