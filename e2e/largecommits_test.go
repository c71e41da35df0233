// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
)

// manyRules is the number of rules that a third party restores in one commit.
const manyRules = 5000

// kubeProxyTable returns an nft script that recreates a table with manyRules rules.
func kubeProxyTable() string {
	var b strings.Builder
	b.WriteString("table ip kube-proxy\ndelete table ip kube-proxy\ntable ip kube-proxy {\n" +
		" chain services { type nat hook prerouting priority dstnat; policy accept;\n")
	for i := range manyRules {
		fmt.Fprintf(&b, "  ip daddr 10.96.%d.%d tcp dport %d counter dnat to 10.1.%d.%d:8080\n",
			i/250, i%250+1, 80+i%2, i/250, i%250+1)
	}
	b.WriteString(" }\n}\n")
	return b.String()
}

// largeCommit is one commit that writes thousands of rules and changes the owned rules.
type largeCommit struct {
	name    string
	backend int
	// program reads the script on standard input.
	program []string
	script  string
}

func largeCommits() []largeCommit {
	restored := strings.TrimSuffix(fixtures.KubeProxy(manyRules), "COMMIT\n")
	keep, all := []string{"iptables-nft-restore", "--noflush"}, []string{"iptables-nft-restore"}
	nft := []string{"nft", "-f", "-"}
	// The scripts change the owned rules before or after they write the other rules: it is unknown
	// which of them the reconciler reads first.
	return []largeCommit{
		{"nft -f, jump deleted", 0, nft, "flush chain ip ip-masq postrouting\n" + kubeProxyTable()},
		{"nft -f, tables deleted", 0, nft, kubeProxyTable() + "delete table ip ip-masq\ndelete table ip6 ip-masq\n"},
		{"nft -f, flush ruleset", 0, nft, "flush ruleset\n" + kubeProxyTable()},
		{"iptables-nft-restore --noflush, jump deleted", 1, keep, restored + "-F POSTROUTING\nCOMMIT\n"},
		{"iptables-nft-restore --noflush, chain deleted", 1, keep, restored + "-F POSTROUTING\n-F IP-MASQ-AGENT\n-X IP-MASQ-AGENT\nCOMMIT\n"},
		{"iptables-nft-restore of the whole table", 1, all, restored + "COMMIT\n"},
		{"nft -f, flush ruleset", 1, nft, "flush ruleset\n" + kubeProxyTable()},
	}
}

// TestDriftInLargeCommit checks that the reconciler repairs drift if the same commit writes thousands
// of third-party rules.
func TestDriftInLargeCommit(t *testing.T) {
	t.Parallel()
	for i, f := range backends()[:2] {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			w := newTamperNode(t, f)
			for _, s := range largeCommits() {
				if s.backend != i {
					continue
				}
				var took durations
				for range 2 {
					count := w.untilIdle(t, 200*time.Millisecond)
					w.feed(t, s.script, s.program[0], s.program[1:]...)
					took = append(took, w.repair(t, count))
				}
				w.checkVerdicts(t)
				t.Logf("%-50s %v", s.name, took)
			}
		})
	}
}
