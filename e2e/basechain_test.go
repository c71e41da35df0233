// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"
)

// TestBaseChainWithoutEffect changes a base chain or its table so that packets do not pass the
// complete rules, or pass them at another priority. It checks that the next ADD repairs owned
// tables. In table nat of iptables, which other programs share, ADD, STATUS and CHECK fail with a
// remedy.
func TestBaseChainWithoutEffect(t *testing.T) {
	t.Parallel()
	const rehook = "flush chain FAM nat POSTROUTING; delete chain FAM nat POSTROUTING; add chain FAM nat POSTROUTING "
	const jump = "; add rule FAM nat POSTROUTING fib daddr type != local counter jump IP-MASQ-AGENT"
	const ownRehook = "flush chain FAM ip-masq postrouting; delete chain FAM ip-masq postrouting; add chain FAM ip-masq postrouting "
	const ownJump = "; add rule FAM ip-masq postrouting fib daddr type != local jump masq-IP-MASQ-AGENT"
	const hooked = "{ type nat hook postrouting priority 100; }"
	for _, f := range backends() {
		for name, c := range map[string]struct {
			nft, restore string   // the change, by nft or by iptables-restore
			ineffective  bool     // packets are no longer masqueraded
			msgs         []string // what the errors contain; nil: the next ADD repairs it
			remedy       string   // "" is iptables -t nat -P POSTROUTING ACCEPT
		}{
			"nftables, dormant":        {nft: "add table FAM ip-masq { flags dormant; }", ineffective: true},
			"nftables, no hook":        {nft: ownRehook + ownJump, ineffective: true},
			"nftables, other hook":     {nft: ownRehook + "{ type nat hook input priority 101; }", ineffective: true},
			"nftables, other type":     {nft: ownRehook + "{ type filter hook postrouting priority 101; }", ineffective: true},
			"nftables, other priority": {nft: ownRehook + "{ type nat hook postrouting priority 99; }" + ownJump},
			"nftables, policy drop":    {nft: "add chain FAM ip-masq postrouting { policy drop; }"},
			"iptables-nft, dormant": {nft: "add table FAM nat { flags dormant; }", ineffective: true,
				msgs: []string{"table FAM nat is dormant", "nft add table FAM nat"}, remedy: "add table FAM nat"},
			"iptables-nft, no hook": {nft: rehook + jump, ineffective: true,
				msgs: []string{"POSTROUTING of table FAM nat has no hook", "delete the chain"}, remedy: rehook + hooked + jump},
			"iptables-nft, other hook": {nft: rehook + "{ type nat hook input priority 100; }", ineffective: true,
				msgs: []string{"POSTROUTING of table FAM nat has type nat hook input priority 100", "delete the chain"}, remedy: rehook + hooked + jump},
			"iptables-nft, other priority": {nft: rehook + "{ type nat hook postrouting priority 50; }" + jump,
				msgs: []string{"POSTROUTING of table FAM nat has type nat hook postrouting priority 50"}, remedy: rehook + hooked + jump},
			"iptables-nft, policy drop":    {nft: "add chain FAM nat POSTROUTING { policy drop; }", msgs: []string{"policy DROP", "-P POSTROUTING ACCEPT"}},
			"iptables-legacy, policy drop": {restore: ":POSTROUTING DROP [0:0]", msgs: []string{"policy DROP", "-P POSTROUTING ACCEPT"}},
		} {
			if !strings.HasPrefix(name, f.name+",") {
				continue
			}
			t.Run(name, func(t *testing.T) {
				n := newNode(t, f)
				keys := dualStack(nil)
				n.conflist(t, "podnet", keys)
				pods, conf := onlyPod(n.pod(t, "podnet")), n.conf(t, "podnet", keys)
				wantMasqueraded := func(masqueraded bool) {
					t.Helper()
					pods.verdicts(t, n, masqueraded, flows{"pod": "1.2.3.4 2001:db8:5::5"})
				}
				wantMasqueraded(true)
				for range 3 {
					n.addAndCheck(t, conf) // the last one uses the verification cache
				}
				for _, family := range families() {
					replacer := strings.NewReplacer("FAM", family[1])
					if c.nft != "" {
						n.feed(t, replacer.Replace(c.nft)+"\n", "nft", "-f", "-")
					} else {
						n.feed(t, "*nat\n"+c.restore+"\nCOMMIT\n", family[0]+"-"+f.variant+"-restore", "--noflush")
					}
				}
				wantMasqueraded(!c.ineffective)

				msgs := func(family string) (all []string) {
					for _, s := range c.msgs {
						all = append(all, strings.ReplaceAll(s, "FAM", family))
					}
					return all
				}
				n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 101, append(msgs("ip"), msgs("ip6")...)...)
				n.wantSays(t, 3, append(msgs("ip"), msgs("ip6")...), "check")
				if c.msgs != nil {
					before := n.snapshot(t)
					for _, command := range []string{"explain 1.2.3.4", "doctor"} {
						n.wantSays(t, 0, msgs("ip")[:1], strings.Fields(command)...)
					}
					n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 100, append(msgs("ip"), msgs("ip6")...)...)
					n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", dualStack(object{"masqLinkLocal": true}))}).want(t, 100, msgs("ip")...)
					n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, msgs("ip")...)
					n.unchanged(t, before)
					for _, family := range families() {
						if c.remedy == "" {
							n.tool(t, family[0], "-t", "nat", "-P", "POSTROUTING", "ACCEPT")
						} else {
							n.feed(t, strings.ReplaceAll(c.remedy, "FAM", family[1])+"\n", "nft", "-f", "-")
						}
					}
				}
				n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
				n.addAndCheck(t, conf).noWarnings(t)
				wantMasqueraded(true)
			})
		}
	}
}

// TestDormantTableBeforeFirstADD checks that neither an ADD nor the reconciler writes rules while
// table nat is dormant, and that the reconciler writes them once the table is active.
func TestDormantTableBeforeFirstADD(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[1])
	conf := n.conf(t, "podnet", nil)
	n.feed(t, "add table ip nat { flags dormant; }\n", "nft", "-f", "-")
	before := n.ruleset(t)
	n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 100, "table ip nat is dormant", "nft add table ip nat")
	n.conflist(t, "podnet", nil)
	r := n.startReconciler(t)
	r.untilUnready(t, "table ip nat is dormant")
	wantSame(t, "rules", n.ruleset(t), before)
	n.tool(t, "nft", "add", "table", "ip", "nat")
	r.untilReady(t)
	n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
	n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
}
