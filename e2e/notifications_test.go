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
