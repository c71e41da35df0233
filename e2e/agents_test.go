// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// agent is one of the agents that do our job every minute, as its documentation
// and its commands have it.
type agent struct {
	name, jumpComment string // the comment by which it looks for its jump
}

func agents() []agent {
	const jump = "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain"
	return []agent{
		{"ip-masq-agent", jump},
		{"ip-masq-agent-v2", `"` + jump + `"`}, // whose quotes are a part of it
	}
}

// cycle is what an agent does every minute with one variant of iptables. It
// returns how many jumps it added.
func (a agent) resync(t *testing.T, n *node, variant string) (added int) {
	t.Helper()
	local := [][]string{{"169.254.0.0/16", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"}, {"fe80::/10"}}
	for i, f := range families() {
		iptables := func(args ...string) (string, int) {
			stdout, stderr, code := run(t, n.Node.Command(n.timeout(t), f[0]+"-"+variant, append([]string{"-t", "nat"}, args...)...))
			return stdout + stderr, code
		}
		if out, code := iptables("-N", "IP-MASQ-AGENT"); code != 0 && !strings.Contains(out, "Chain already exists") {
			t.Fatalf("%s: make chain: %s", a.name, out)
		}
		jump := []string{"POSTROUTING", "-m", "comment", "--comment", a.jumpComment, "-m", "addrtype", "!", "--dst-type", "LOCAL", "-j", "IP-MASQ-AGENT"}
		if _, code := iptables(append([]string{"-C"}, jump...)...); code != 0 {
			if out, code := iptables(append([]string{"-A"}, jump...)...); code != 0 {
				t.Fatalf("%s: add jump: %s", a.name, out)
			}
			added++
		}
		var b strings.Builder
		b.WriteString("*nat\n:IP-MASQ-AGENT - [0:0]\n")
		for _, cidr := range local[i] {
			fmt.Fprintf(&b, "-A IP-MASQ-AGENT -m comment --comment \"ip-masq-agent: local traffic is not subject to MASQUERADE\" -d %s -j RETURN\n", cidr)
		}
		b.WriteString("-A IP-MASQ-AGENT -m comment --comment \"ip-masq-agent: outbound traffic is subject to MASQUERADE " +
			"(must be last in chain)\" -j MASQUERADE --random-fully\nCOMMIT\n")
		n.feed(t, b.String(), f[0]+"-"+variant+"-restore", "--noflush")
	}
	return added
}

// TestPluginWithRunningAgent lets an agent run for three of its cycles beside our ADDs: in
// the end there is one jump, the rules are right, and neither undoes what the
// other did.
func TestPluginWithRunningAgent(t *testing.T) {
	t.Parallel()
	for _, a := range agents() {
		for _, agentFirst := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s first %v", a.name, agentFirst), func(t *testing.T) {
				onEveryBackend(t, func(t *testing.T, n *node) { pluginWithRunningAgent(t, n, a, agentFirst) })
			})
		}
	}
}

func pluginWithRunningAgent(t *testing.T, n *node, a agent, agentFirst bool) {
	t.Helper()
	n.addThirdPartyRules(t)
	others := n.thirdPartyRuleset(t, "IP-MASQ-AGENT")
	path, log := n.tracePrograms(t)
	variant, jumps := n.backend.variant, 1
	if variant == "" { // the agent's chain stands in iptables and ours does not
		variant, jumps = "nft", 2
	}
	conf := n.conf(t, "podnet", object{"enableIPv6": true})
	add := invocation{verb: "ADD", conf: conf, path: path}
	if !agentFirst {
		n.invoke(t, add).want(t, 0).noWarnings(t)
	}
	for cycle := range 3 {
		if added := a.resync(t, n, variant); cycle == 2 && added > 0 {
			t.Errorf("the agent still adds %d jumps: it does not know the one that stands", added)
		}
		tracedCalls(t, log)
		before := n.generation(t)
		n.invoke(t, add).want(t, 0).noWarnings(t)
		calls, after := tracedCalls(t, log), n.generation(t)
		if wrote := after != before || strings.Contains(strings.Join(calls, " "), "-restore"); wrote && cycle > 0 {
			t.Errorf("cycle %d: ADD wrote: generation %d to %d, programs %q", cycle, before, after, calls)
		}
		want := jumps
		if n.backend.variant == "" && agentFirst && cycle == 0 {
			want = 1 // what it had left was removed, once
		}
		n.wantJumps(t, "IP-MASQ-AGENT", want, want)
		n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0).noWarnings(t)
	}
	if d := cmp.Diff(others, n.thirdPartyRuleset(t, "IP-MASQ-AGENT")); d != "" {
		t.Errorf("rules of others changed:\n%s", d)
	}
}

// TestPluginWithBothAgents: two agents that look for different jumps, and ADDs.
func TestPluginWithBothAgents(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			conf := n.conf(t, "podnet", object{"enableIPv6": true})
			for range 2 {
				for _, a := range agents() {
					a.resync(t, n, f.variant)
					n.addAndCheck(t, conf).noWarnings(t)
					n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
				}
			}
		})
	}
}

// TestAgentChainTakeover: a chain that an agent left is taken over with its jumps, however
// many and whatever its rules, as long as it only returns and masquerades.
func TestAgentChainTakeover(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		for name, left := range map[string]string{
			"an empty chain": "",
			"no jump":        "-A IP-MASQ-AGENT -d 198.51.100.0/24 -j RETURN\n-A IP-MASQ-AGENT -j MASQUERADE\n",
			"three jumps": "-A POSTROUTING -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT\n" +
				"-A POSTROUTING -m comment --comment \"\\\"ip-masq-agent: quoted\\\"\" -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT\n" +
				"-A POSTROUTING -j IP-MASQ-AGENT\n-A IP-MASQ-AGENT -s 10.9.0.0/16 -o eth+ -j RETURN\n-A IP-MASQ-AGENT -p udp -j MASQUERADE --to-ports 1024-2048\n",
		} {
			t.Run(f.name+" "+name, func(t *testing.T) {
				n := newNode(t, f)
				n.addThirdPartyRules(t)
				others := n.thirdPartyRuleset(t, "IP-MASQ-AGENT")
				n.feed(t, "*nat\n:IP-MASQ-AGENT - [0:0]\n"+left+"COMMIT\n", "iptables-"+f.variant+"-restore", "--noflush")
				n.invoke(t, invocation{verb: "STATUS", conf: n.conf(t, "podnet", nil)}).want(t, 0)
				n.addAndCheck(t, n.conf(t, "podnet", nil)).noWarnings(t)
				n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
				if d := cmp.Diff(others, n.thirdPartyRuleset(t, "IP-MASQ-AGENT")); d != "" {
					t.Errorf("rules of others changed:\n%s", d)
				}
			})
		}
	}
}

// TestAgentChainRemovedFromIPTables: with nftables, what an agent left in either variant of
// iptables goes once ours stands; without their programs it stays, and no ADD
// fails for it.
func TestAgentChainRemovedFromIPTables(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.addThirdPartyRules(t)
	others := n.thirdPartyRuleset(t, "IP-MASQ-AGENT")
	agents()[0].resync(t, n, "nft")
	agents()[1].resync(t, n, "legacy")
	conf := n.conf(t, "podnet", nil)
	a := n.invoke(t, invocation{verb: "ADD", conf: conf, path: "/nonexistent"}).want(t, 0, "remove chain IP-MASQ-AGENT (ipv4), IP-MASQ-AGENT (ipv6) from iptables (nft)", "from iptables (legacy)", "install iptables")
	n.wantJumps(t, "IP-MASQ-AGENT", 3, 2)
	if !strings.Contains(a.stderr, "(ipv6)") {
		t.Errorf("says nothing of IPv6:\n%s", a.stderr)
	}
	n.path = n.linkBothVariants(t, "nft")
	n.flush(t)
	n.addThirdPartyRules(t)
	agents()[0].resync(t, n, "nft")
	n.addAndCheck(t, conf).noWarnings(t)
	n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
	if rest := strings.Count(n.saved(t), "IP-MASQ-AGENT"); rest > 0 {
		t.Errorf("left in iptables:\n%s", n.saved(t))
	}
	if now := n.thirdPartyRuleset(t, "IP-MASQ-AGENT"); strings.Count(now, "not yours") != strings.Count(others, "not yours") {
		t.Errorf("rules of others changed:\n%s", now)
	}
}

// TestThirdPartyChain: a chain of our name that holds what neither we nor the
// agents write is left alone, with an error.
func TestThirdPartyChain(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			n.addThirdPartyRules(t)
			conf := n.conf(t, "podnet", object{"enableIPv6": true})
			for _, rule := range []string{
				"-j LOG", "-j ACCEPT", "-j SNAT --to-source 192.0.2.1", "-g KUBE-POSTROUTING",
				"-p tcp -m tcp --dport 80 -m limit --limit 5/min -j RETURN",
			} {
				n.feed(t, "*nat\n:IP-MASQ-AGENT - [0:0]\n-A IP-MASQ-AGENT -d 10.0.0.0/8 -j RETURN\n-A IP-MASQ-AGENT "+rule+"\n"+
					"-A IP-MASQ-AGENT -j MASQUERADE\nCOMMIT\n", "iptables-"+f.variant+"-restore", "--noflush")
				before := n.ruleset(t)
				for range 2 {
					n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 100, "chain IP-MASQ-AGENT (ipv4)", "belongs to another program",
						"holds rules that neither ip-masq nor its agents write", "choose another masqChain, or remove the chain")
				}
				n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0)
				if after := n.ruleset(t); after != before {
					t.Errorf("%s: rules changed:\n%s", rule, cmp.Diff(before, after))
				}
				if documents := n.load(t).Sources; len(documents) > 0 {
					t.Errorf("%s: documents: %+v", rule, documents)
				}
			}
			n.addAndCheck(t, n.conf(t, "podnet", object{"masqChain": "OURS"})).noWarnings(t)
		})
	}
}
