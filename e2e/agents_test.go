// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// agent is one of the agents that ip-masq replaces, as its documentation describes it.
type agent struct {
	name, jumpComment string
}

func agents() []agent {
	const jump = "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain"
	return []agent{
		{"ip-masq-agent", jump},
		{"ip-masq-agent-v2", `"` + jump + `"`}, // the quotes are part of the comment
	}
}

// resync does what an agent does every minute, with one variant of iptables. It returns the number
// of jumps that the agent added.
func (a agent) resync(t *testing.T, n *node, variant string) (added int) {
	t.Helper()
	local := [][]string{{"169.254.0.0/16", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"}, {"fe80::/10"}}
	for i, f := range families() {
		iptables := func(args ...string) (string, int) {
			stdout, stderr, code := run(t, n.Node.Command(n.timeout(t), f[0]+"-"+variant, append([]string{"-t", "nat"}, args...)...))
			return stdout + stderr, code
		}
		if out, code := iptables("-N", "IP-MASQ-AGENT"); code != 0 && !strings.Contains(out, "Chain already exists") {
			t.Fatalf("%s: create chain: %s", a.name, out)
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

// TestPluginWithRunningAgent alternates three resyncs of an agent with ADDs. It checks that one
// jump remains, that the rules are correct and that neither program reverts the other's rules, apart
// from the exemption of multicast.
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

// pluginWithRunningAgent runs TestPluginWithRunningAgent for one agent and one order.
func pluginWithRunningAgent(t *testing.T, n *node, a agent, agentFirst bool) {
	t.Helper()
	n.addThirdPartyRules(t)
	thirdParty := n.thirdPartyRuleset(t, "IP-MASQ-AGENT")
	path, log := n.tracePrograms(t)
	variant, jumps := n.backend.variant, 1
	if variant == "" { // the agent's chain is in iptables, the owned chain is not
		variant, jumps = "nft", 2
	}
	conf := n.conf(t, "podnet", object{"enableIPv6": true})
	add := invocation{verb: "ADD", conf: conf, path: path}
	if !agentFirst {
		n.invoke(t, add).want(t, 0).noWarnings(t)
	}
	for cycle := range 3 {
		if added := a.resync(t, n, variant); cycle == 2 && added > 0 {
			t.Errorf("the agent still adds %d jumps; it does not find the existing jump", added)
		}
		tracedCalls(t, log)
		before := n.generation(t)
		n.invoke(t, add).want(t, 0).noWarnings(t)
		calls, after := tracedCalls(t, log), n.generation(t)
		// In the common chain the agent removes the rules that exempt multicast, and ADD restores them.
		inCommonChain := n.backend.variant != ""
		if wrote := after != before || strings.Contains(strings.Join(calls, " "), "-restore"); wrote != inCommonChain && cycle > 0 {
			t.Errorf("cycle %d: ADD wrote %t: generation %d to %d, programs %q", cycle, wrote, before, after, calls)
		}
		want := jumps
		if n.backend.variant == "" && agentFirst && cycle == 0 {
			want = 1 // the ADD has removed the agent's chain
		}
		n.wantJumps(t, "IP-MASQ-AGENT", want, want)
		n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0).noWarnings(t)
	}
	wantSame(t, "third-party rules", n.thirdPartyRuleset(t, "IP-MASQ-AGENT"), thirdParty)
}

// TestAgentChainTakeover checks that ADD takes over the chain of an agent and replaces its jumps,
// if the chain has only rules of the agents' forms.
func TestAgentChainTakeover(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		for name, rules := range map[string]string{
			"empty chain": "",
			"no jump":     "-A IP-MASQ-AGENT -d 198.51.100.0/24 -j RETURN\n-A IP-MASQ-AGENT -j MASQUERADE\n",
			"three jumps": "-A POSTROUTING -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT\n" +
				"-A POSTROUTING -m comment --comment \"\\\"ip-masq-agent: quoted\\\"\" -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT\n" +
				"-A POSTROUTING -j IP-MASQ-AGENT\n-A IP-MASQ-AGENT -d 10.9.0.0/16 -m addrtype ! --dst-type LOCAL -j RETURN\n-A IP-MASQ-AGENT -p udp -j MASQUERADE --to-ports 1024-2048\n",
		} {
			t.Run(f.name+" "+name, func(t *testing.T) {
				n := newNode(t, f)
				n.addThirdPartyRules(t)
				thirdParty := n.thirdPartyRuleset(t, "IP-MASQ-AGENT")
				n.feed(t, "*nat\n:IP-MASQ-AGENT - [0:0]\n"+rules+"COMMIT\n", "iptables-"+f.variant+"-restore", "--noflush")
				n.invoke(t, invocation{verb: "STATUS", conf: n.conf(t, "podnet", nil)}).want(t, 0)
				n.addAndCheck(t, n.conf(t, "podnet", nil)).noWarnings(t)
				n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
				wantSame(t, "third-party rules", n.thirdPartyRuleset(t, "IP-MASQ-AGENT"), thirdParty)
			})
		}
	}
}

// TestAgentChainRemovedFromIPTables checks that ADD with backend nftables removes an agent's chain
// from both variants of iptables. Without the iptables programs the chain stays and ADD succeeds
// with a warning.
func TestAgentChainRemovedFromIPTables(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.addThirdPartyRules(t)
	thirdParty := n.thirdPartyRuleset(t, "IP-MASQ-AGENT")
	agents()[0].resync(t, n, "nft")
	agents()[1].resync(t, n, "legacy")
	conf := n.conf(t, "podnet", nil)
	n.invoke(t, invocation{verb: "ADD", conf: conf, path: "/nonexistent"}).want(t, 0, "remove chain IP-MASQ-AGENT (ipv4), IP-MASQ-AGENT (ipv6) from iptables (nft)", "from iptables (legacy)", "install iptables")
	n.wantJumps(t, "IP-MASQ-AGENT", 3, 2)
	n.path = n.linkBothVariants(t, "nft")
	n.flush(t)
	n.addThirdPartyRules(t)
	agents()[0].resync(t, n, "nft")
	n.addAndCheck(t, conf).noWarnings(t)
	n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
	if rest := strings.Count(n.saved(t), "IP-MASQ-AGENT"); rest > 0 {
		t.Errorf("chain remains in iptables:\n%s", n.saved(t))
	}
	wantSame(t, "third-party rules", strings.Count(n.thirdPartyRuleset(t, "IP-MASQ-AGENT"), "not yours"), strings.Count(thirdParty, "not yours"))
}

// TestThirdPartyChain checks that ADD refuses a chain of the same name with a rule that neither ip-masq nor the agents
// write, and changes nothing. ADD and check print the rule and the command that deletes it, after which ADD adopts the
// chain.
func TestThirdPartyChain(t *testing.T) {
	onBackends(t, backends()[1:], func(t *testing.T, n *node) {
		n.addThirdPartyRules(t)
		conf := n.conf(t, "podnet", object{"enableIPv6": true})
		for _, rule := range []string{
			"-j LOG", "-j ACCEPT", "-j SNAT --to-source 192.0.2.1", "-g KUBE-POSTROUTING",
			"-p tcp -m tcp --dport 80 -m limit --limit 5/min -j RETURN",
			"-d 10.1.0.0/16 -o wg0 -j RETURN", "-s 10.9.0.0/16 -j RETURN", "-p udp -m udp --dport 53 -j RETURN",
			"-m mark --mark 0x2000/0x2000 -j RETURN", "-p tcp -j MASQUERADE", "-m addrtype ! --src-type LOCAL -j RETURN",
		} {
			n.feed(t, "*nat\n:IP-MASQ-AGENT - [0:0]\n-A IP-MASQ-AGENT -d 10.0.0.0/8 -j RETURN\n-A IP-MASQ-AGENT "+rule+"\n"+
				"-A IP-MASQ-AGENT -j MASQUERADE\nCOMMIT\n", "iptables-"+n.backend.variant+"-restore", "--noflush")
			before := n.ruleset(t)
			program := "iptables-" + n.backend.variant
			printed := n.tool(t, program, "-t", "nat", "-S", "IP-MASQ-AGENT", "2")
			printed = strings.TrimSpace(printed)
			command := program + " -t nat -D IP-MASQ-AGENT 2"
			for range 2 {
				n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 100, "chain IP-MASQ-AGENT (ipv4)", "belongs to another program",
					"neither ip-masq nor its agents write rule 2 `"+printed+"` ("+command+")", "choose another masqChain")
			}
			n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0)
			wantSame(t, "rules", n.ruleset(t), before)
			if documents := n.load(t).Sources; len(documents) > 0 {
				t.Errorf("%s: documents: %+v", rule, documents)
			}
			stdout, stderr, code := n.reconciler(t, "check", "--masq-chain=IP-MASQ-AGENT") // as the preview of a migration
			if code == 0 || !strings.Contains(stdout+stderr, printed) || !strings.Contains(stdout+stderr, command) {
				t.Errorf("check: exit code %d: %s%s", code, stdout, stderr)
			}
			wantSame(t, "rules", n.ruleset(t), before)
			n.tool(t, strings.Fields(command)[0], strings.Fields(command)[1:]...)
			n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
		}
		n.addAndCheck(t, conf).noWarnings(t)
	})
}

// TestThirdPartyJump checks that ADD refuses a chain of the agents' rules to which another jump than theirs leads, as
// packets that do not meet the conditions of that jump would be masqueraded. ADD and check print the jump and the
// command that deletes it, after which ADD adopts the chain. Beside the jump of an agent, or one without a condition,
// every packet reaches the chain already.
func TestThirdPartyJump(t *testing.T) {
	const agents = "*nat\n:IP-MASQ-AGENT - [0:0]\n-A IP-MASQ-AGENT -d 10.0.0.0/8 -j RETURN\n-A IP-MASQ-AGENT -j MASQUERADE\n"
	onBackends(t, backends()[1:], func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", nil)
		restore, program := "iptables-"+n.backend.variant+"-restore", "iptables-"+n.backend.variant
		for _, jump := range []string{
			"-o outside -j IP-MASQ-AGENT", "-m addrtype ! --dst-type LOCAL -g IP-MASQ-AGENT",
			"-s 10.88.0.0/16 -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT", "-m mark --mark 0x1 -j IP-MASQ-AGENT",
		} {
			n.feed(t, agents+"-A POSTROUTING "+jump+"\nCOMMIT\n", restore, "--noflush")
			before := n.ruleset(t)
			lines := strings.Split(strings.TrimSpace(n.tool(t, program, "-t", "nat", "-S", "POSTROUTING")), "\n")
			number := len(lines) - 1 // the first line is the policy
			command := fmt.Sprintf("%s -t nat -D POSTROUTING %d", program, number)
			printed := fmt.Sprintf("rule %d of POSTROUTING `%s` (%s)", number, lines[number], command)
			n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 100, "chain IP-MASQ-AGENT (ipv4)", "belongs to another program", printed)
			n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, printed)
			stdout, stderr, code := n.reconciler(t, "check", "--masq-chain=IP-MASQ-AGENT")
			if code == 0 || !strings.Contains(stdout+stderr, printed) {
				t.Errorf("check: exit code %d: %s%s", code, stdout, stderr)
			}
			wantSame(t, "rules", n.ruleset(t), before)
			n.tool(t, strings.Fields(command)[0], strings.Fields(command)[1:]...)
			n.addAndCheck(t, conf).noWarnings(t)
			n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0)
			n.cleanup(t)
		}
		for _, jump := range []string{"-j IP-MASQ-AGENT", "-m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT"} {
			n.feed(t, agents+"-A POSTROUTING -o outside -j IP-MASQ-AGENT\n-A POSTROUTING "+jump+"\nCOMMIT\n", restore, "--noflush")
			n.addAndCheck(t, conf).noWarnings(t)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
			n.cleanup(t)
		}
	})
}

// TestThirdPartyChainBesideNFTables checks that check prints which rules of an agent's chain keep it in iptables, where the
// backend is nftables.
func TestThirdPartyChainBesideNFTables(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.feed(t, "*nat\n:IP-MASQ-AGENT - [0:0]\n-A IP-MASQ-AGENT -s 10.9.0.0/16 -j RETURN\n-A IP-MASQ-AGENT -j MASQUERADE\nCOMMIT\n",
		"iptables-nft-restore", "--noflush")
	n.path = n.linkBothVariants(t, "nft")
	n.conflist(t, "podnet", nil)
	rule := "rule 1 `-A IP-MASQ-AGENT -s 10.9.0.0/16 -j RETURN` (iptables-nft -t nat -D IP-MASQ-AGENT 1); " +
		"delete it, and ip-masq removes the chain"
	n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", nil)}).want(t, 0, rule)
	stdout, stderr, code := n.reconciler(t, "check")
	if code == 0 || !strings.Contains(stdout+stderr, rule) {
		t.Errorf("check: exit code %d: %s%s", code, stdout, stderr)
	}
	if strings.Contains(stdout+stderr, "masqChain") { // under another name the agent's chain would stay
		t.Errorf("check proposes another name: %s%s", stdout, stderr)
	}
	if saved := n.saved(t); !strings.Contains(saved, "-A IP-MASQ-AGENT -s 10.9.0.0/16 -j RETURN") {
		t.Errorf("iptables has:\n%s", saved)
	}
	n.tool(t, "iptables-nft", "-t", "nat", "-D", "IP-MASQ-AGENT", "1")
	n.addAndCheck(t, n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}))
	if saved := n.saved(t); strings.Contains(saved, "IP-MASQ-AGENT") {
		t.Errorf("the agent's chain stays:\n%s", saved)
	}
}

// TestListingMatchesAgent compares `iptables -t nat -L IP-MASQ-AGENT` with the listing in the Kubernetes documentation
// (Administer a Cluster, "IP Masquerade Agent User Guide"): targets, sources and destinations, in order.
func TestListingMatchesAgent(t *testing.T) {
	t.Parallel()
	// With the files of the machine, iptables prints names from /etc/networks ("link-local") or waits for DNS.
	const list = `mount -t tmpfs tmpfs /etc && printf 'hosts: files\nnetworks: files\n' >/etc/nsswitch.conf && exec "$0" -t nat -L IP-MASQ-AGENT`
	multicast := []string{"RETURN anywhere 224.0.0.0/4", "RETURN anywhere 255.255.255.255"} // the one difference
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			for _, c := range []struct {
				keys object
				want []string
			}{
				{object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}, slices.Concat([]string{"RETURN anywhere 169.254.0.0/16"}, multicast, []string{"RETURN anywhere 10.0.0.0/8"})},
				{object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}, "masqLinkLocal": true}, slices.Concat(multicast, []string{"RETURN anywhere 10.0.0.0/8"})},
			} {
				n.conflist(t, "podnet", c.keys)
				n.pod(t, "podnet")
				listing := n.tool(t, "unshare", "--mount", "sh", "-c", list, filepath.Join(n.dir, "bin", "iptables"))
				heading, rules, _ := strings.Cut(listing, "\n")
				got := []string{heading}
				for line := range strings.Lines(rules) {
					columns := strings.Fields(line) // target prot opt source destination
					got = append(got, columns[0]+" "+columns[3]+" "+columns[4])
				}
				want := slices.Concat([]string{"Chain IP-MASQ-AGENT (1 references)", "target source destination"}, c.want, []string{"MASQUERADE anywhere anywhere"})
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%v (-want +got):\n%s\n%s", c.keys, diff, listing)
				}
			}
		})
	}
}
