// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// explanation is the output of `explain -o json`.
type explanation struct {
	Verdict, Reason, Problem string
	Kernel                   *bool  // nil: perhaps
	OverriddenBy             string `json:"overridden_by"`
}

// agrees reports whether the kernel agrees for certain, and overridden whether it does not for certain.
func (e explanation) agrees() bool { return e.Kernel != nil && *e.Kernel }

func (e explanation) overridden() bool { return e.Kernel != nil && !*e.Kernel }

func (e explanation) kernel() string {
	if e.Kernel == nil {
		return "null"
	}
	return fmt.Sprint(*e.Kernel)
}

func (n *node) explain(t *testing.T, args ...string) explanation {
	t.Helper()
	stdout, stderr, code := n.reconciler(t, append([]string{"explain", "-o", "json"}, args...)...)
	var e explanation
	if err := json.Unmarshal([]byte(stdout), &e); err != nil || code != 0 {
		t.Fatalf("explain %v: exit code %d, %v\n%s%s", args, code, err, stdout, stderr)
	}
	return e
}

// thirdPartyRules are rules of another program at the postrouting hook: iptables lines of a
// variant, or an nft script that creates the table ip other.
type thirdPartyRules struct {
	name    string
	variant string
	lines   string
	nft     string
	// by is a part of the rule that explain names for the pod's traffic.
	by string
	// elsewhere is a part of the rule that explain names only for other sources.
	elsewhere string
}

func thirdPartyRuleCases(node, dataDir string) []thirdPartyRules {
	base := func(priority, rules string) string {
		return "table ip other {\nset exempt { type ipv4_addr; flags interval; auto-merge; elements = { 10.244.0.0/16, 10.96.0.0/12 } }\n" +
			"chain post { type nat hook postrouting priority " + priority + "; policy accept;\n" + rules + "\n}\n}\n"
	}
	const pods = "-s 10.1.0.0/16"
	return []thirdPartyRules{
		{name: "MASQUERADE first", variant: "nft", lines: "-I POSTROUTING " + pods + " -j MASQUERADE", by: "-s 10.1.0.0/16 -j MASQUERADE"},
		{name: "MASQUERADE appended", variant: "nft", lines: "-A POSTROUTING " + pods + " -j MASQUERADE", by: "-s 10.1.0.0/16 -j MASQUERADE"},
		{name: "MASQUERADE in legacy, first", variant: "legacy", lines: "-I POSTROUTING " + pods + " -j MASQUERADE", by: "-s 10.1.0.0/16 -j MASQUERADE"},
		{name: "MASQUERADE in legacy, appended", variant: "legacy", lines: "-A POSTROUTING " + pods + " -j MASQUERADE", by: "-s 10.1.0.0/16 -j MASQUERADE"},
		{name: "MASQUERADE of all, out of one interface", variant: "nft", lines: "-I POSTROUTING -o lan -j MASQUERADE", by: "-o lan -j MASQUERADE"},
		{name: "MASQUERADE of TCP", variant: "nft", lines: "-I POSTROUTING -p tcp -j MASQUERADE", by: "-p tcp -j MASQUERADE"},
		{name: "nft at 100", nft: base("100", "ip saddr 10.1.0.0/16 masquerade"), by: "table other, chain post: ip saddr 10.1.0.0/16 masquerade"},
		{name: "nft at 99", nft: base("99", "ip saddr 10.1.0.0/16 masquerade"), by: "table other, chain post: ip saddr 10.1.0.0/16 masquerade"},
		{name: "nft at 110", nft: base("110", "ip saddr 10.1.0.0/16 masquerade"), by: "table other, chain post: ip saddr 10.1.0.0/16 masquerade"},
		{name: "nft at the priority of ip-masq", nft: base("101", "ip saddr 10.1.0.0/16 masquerade"), by: "table other, chain post: ip saddr 10.1.0.0/16 masquerade"},
		{name: "SNAT first", variant: "nft", lines: "-I POSTROUTING " + pods + " -j SNAT --to-source " + node, by: "-s 10.1.0.0/16 -j SNAT --to-source " + node},
		{name: "SNAT appended", variant: "nft", lines: "-A POSTROUTING " + pods + " -j SNAT --to-source " + node, by: "-s 10.1.0.0/16 -j SNAT --to-source " + node},
		{name: "ACCEPT first", variant: "nft", lines: "-I POSTROUTING " + pods + " -j ACCEPT", by: "-s 10.1.0.0/16 -j ACCEPT"},
		{name: "ACCEPT first in legacy", variant: "legacy", lines: "-I POSTROUTING " + pods + " -j ACCEPT", by: "-s 10.1.0.0/16 -j ACCEPT"},
		{name: "RETURN first", variant: "nft", lines: "-I POSTROUTING " + pods + " -j RETURN", by: "-s 10.1.0.0/16 -j RETURN"},
		{name: "ACCEPT appended", variant: "nft", lines: "-A POSTROUTING " + pods + " -j ACCEPT"},
		{name: "accept in an earlier table", nft: base("90", "ip saddr 10.1.0.0/16 accept")},
		{name: "kubenet", variant: "nft", lines: `-I POSTROUTING ! -d 192.168.0.0/16 -m comment --comment "kubenet: SNAT for outbound traffic from cluster" ` +
			"-m addrtype ! --dst-type LOCAL -j MASQUERADE", by: "kubenet: SNAT"},
		{name: "kube-proxy", variant: "nft", lines: ":KUBE-POSTROUTING - [0:0]\n-I POSTROUTING -j KUBE-POSTROUTING\n" +
			"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n-A KUBE-POSTROUTING -j MASQUERADE --random-fully"},
		{name: "Docker", variant: "nft", lines: "-I POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
			elsewhere: "-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"},
		{name: "flannel", variant: "nft", lines: ":FLANNEL-POSTRTG - [0:0]\n-A POSTROUTING -j FLANNEL-POSTRTG\n" +
			"-A FLANNEL-POSTRTG -s 10.1.0.0/16 -d 10.1.0.0/16 -j RETURN\n-A FLANNEL-POSTRTG -s 10.1.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE",
			by: "-A FLANNEL-POSTRTG -s 10.1.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE"},
		{name: "kindnet", nft: base("90", "ct state established,related accept\nfib daddr type local accept\nip daddr @exempt accept\nmasquerade"),
			by: "table other, chain post: masquerade"},
		{name: "kindnet with the destination exempt", nft: base("90", "ct state established,related accept\nip daddr { 10.0.0.0/8, 192.168.0.0/16 } accept\nmasquerade")},
		{name: "exempt by an earlier rule", variant: "nft", lines: "-A POSTROUTING -d 10.9.9.0/24 -j ACCEPT\n-A POSTROUTING -d 10.0.0.0/8 -j MASQUERADE"},
		{name: "exempt by an earlier rule for the interface", variant: "nft", lines: "-A POSTROUTING -o lan -j RETURN\n-A POSTROUTING -d 10.0.0.0/8 -j MASQUERADE"},
		{name: "exempt by an earlier rule for the interface, in nft", nft: base("110", "oifname lan accept\nip daddr 10.0.0.0/8 masquerade")},
		{name: "an owned chain without a policy", variant: "legacy", lines: ":OLD - [0:0]\n-I POSTROUTING -j OLD\n" +
			"-A OLD -m comment --comment \"" + policy.OwnedBy(dataDir).Comment() + "\" -j MASQUERADE", by: "-A OLD -m comment"},
	}
}

// load loads the rules and returns a function that deletes them; chains stay.
func (o thirdPartyRules) load(t *testing.T, n *node) (take func()) {
	t.Helper()
	if o.nft != "" {
		n.feed(t, o.nft, "nft", "-f", "-")
		return func() { n.tool(t, "nft", "delete", "table", "ip", "other") }
	}
	restore := func(lines string) {
		n.feed(t, "*nat\n"+lines+"\nCOMMIT\n", "iptables-"+o.variant+"-restore", "--noflush")
	}
	restore(o.lines)
	return func() {
		var undo []string
		for line := range strings.Lines(o.lines) {
			if verb, rest, _ := strings.Cut(line, " "); verb == "-A" || verb == "-I" {
				undo = append(undo, "-D "+strings.TrimSpace(rest))
			}
		}
		restore(strings.Join(undo, "\n"))
	}
}

// TestExplainThirdPartyRules loads rules of third parties before and behind those of ip-masq. It
// checks that explain reports agreement with the kernel exactly if packets get the policy's
// verdict, and names the overriding rule otherwise.
func TestExplainThirdPartyRules(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.conflist(t, "podnet", nil)
		p := n.pod(t, "podnet")
		n.wantExplanation(t, p, "", "")
		for _, o := range thirdPartyRuleCases(n.NodeAddr(n.Outside, p.addrs[0]).Next().Next().String(), n.dataDir) {
			t.Run(o.name, func(t *testing.T) {
				defer o.load(t, n)()
				n.wantExplanation(t, p, o.by, o.elsewhere)
			})
		}
		n.wantExplanation(t, p, "", "")
	})
}

// TestExplainBridgeIPMasq checks explain with the bridge plugin's ipMasq.
func TestExplainBridgeIPMasq(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.cni.Env = []string{"PATH=" + n.path + ":" + os.Getenv("PATH")} // bridge runs iptables
		bridge := n.bridge("podnet")
		bridge["ipMasq"] = true
		n.write(t, "podnet", bridge, n.entry(nil))
		n.wantExplanation(t, n.pod(t, "podnet"), "MASQUERADE", "")
	})
}

// TestExplainIPv6 checks explain for IPv6, with a third party's rule in an inet table.
func TestExplainIPv6(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.conflist(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"fd00:9::/32"}})
		all := onlyPod(n.pod(t, "podnet"))
		all.verdicts(t, n, false, map[string]string{"pod": "fd00:9::9"})
		if e := n.explain(t, "fd00:9::9", "--from", "fd00:1::2"); e.Verdict != "exempt" || !e.agrees() || e.OverriddenBy != "" {
			t.Errorf("without third-party rules: %+v", e)
		}
		n.feed(t, "table inet other {\nchain post { type nat hook postrouting priority 90;\nip6 saddr fd00:1::/64 ip6 daddr fd00:9::/64 masquerade\n}\n}\n", "nft", "-f", "-")
		all.verdicts(t, n, true, map[string]string{"pod": "fd00:9::9"})
		if e := n.explain(t, "fd00:9::9", "--from", "fd00:1::2"); e.Verdict != "exempt" || !e.overridden() || !strings.Contains(e.OverriddenBy, "nftables, ipv6, table other, chain post: ip6 saddr fd00:1::/64 ip6 daddr fd00:9::/64 masquerade") {
			t.Errorf("with a third party's rule: %+v", e)
		}
		wantSame(t, "what overrides IPv4", n.explain(t, "10.9.9.9", "--from", "10.1.0.2").OverriddenBy, "")
	})
}

// wantExplanation compares explain with the source addresses of the pod's packets to an exempt and a
// masqueraded destination. An answer that is not perhaps must be what the packets of all transports show. It
// is perhaps only if the transports differ or, without --from, if it depends on the source.
func (n *node) wantExplanation(t *testing.T, p *pod, by, elsewhere string) {
	t.Helper()
	for to, verdict := range map[string]string{"10.9.9.9": "exempt", "1.2.3.4": "masquerade"} {
		dst := netip.MustParseAddr(to)
		own := p.addr(dst)
		want := own
		if verdict == "masquerade" {
			want = n.NodeAddr(n.Outside, dst)
		}
		all, some := true, false
		for transport, send := range transports() {
			seen, err := send(p.Host, netip.AddrPortFrom(dst, topology.EchoPort), topology.FromPort(n.nextPort()))
			if err != nil {
				t.Fatalf("%s to %s: %v", transport, to, err)
			}
			does := seen.Source.Addr() == want
			all, some = all && does, some || does
		}
		for _, args := range [][]string{{to, "--from", own.String()}, {to}} {
			e := n.explain(t, args...)
			anySource := len(args) == 1
			rule := by
			if anySource {
				rule += elsewhere
			}
			isWrong := e.agrees() && !all || e.overridden() && some
			// The kernel does not tell the order of base chains of one priority in several tables.
			isTied := n.backend.variant == "legacy" && strings.Contains(e.OverriddenBy, "iptables (nft), ipv4, table nat")
			isVague := e.Kernel == nil && all == some && !anySource && !isTied
			if e.Verdict != verdict || isWrong || isVague {
				t.Errorf("explain %v: %s, kernel %s, overridden by %q, problem %q; packets of the pod get that verdict: all %t, some %t\n%s",
					args, e.Verdict, e.kernel(), e.OverriddenBy, e.Problem, all, some, n.ruleset(t))
			}
			if e.agrees() != (e.OverriddenBy == "") || !e.agrees() && !strings.Contains(e.OverriddenBy, rule) {
				t.Errorf("explain %v: kernel %s, overridden by %q, want a rule with %q", args, e.kernel(), e.OverriddenBy, rule)
			}
			text, _, _ := n.reconciler(t, append([]string{"explain"}, args...)...)
			says := "agrees"
			switch {
			case e.overridden():
				says = "kernel   overridden by " + strings.SplitN(e.OverriddenBy, "\n", 2)[0]
			case e.Kernel == nil:
				says = "kernel   may be overridden by " + strings.SplitN(e.OverriddenBy, "\n", 2)[0]
			}
			if !strings.Contains(text, says) {
				t.Errorf("explain %v does not say %q:\n%s", args, says, text)
			}
		}
	}
}

// TestExplainLocalRoutes checks that explain takes local destinations from the routing tables, not
// only from the addresses of interfaces.
func TestExplainLocalRoutes(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.conflist(t, "podnet", object{"masqueradeHost": false, "enableIPv6": true})
	n.pod(t, "podnet")
	n.tool(t, "ip", "route", "add", "local", "198.18.0.0/15", "dev", "lo")
	n.tool(t, "ip", "-6", "route", "add", "local", "2001:db8:18::/48", "dev", "lo")
	// A transparent proxy's local route applies only to marked packets.
	n.tool(t, "ip", "rule", "add", "fwmark", "1", "lookup", "100")
	n.tool(t, "ip", "route", "add", "local", "0.0.0.0/0", "dev", "lo", "table", "100")
	for _, q := range []struct{ args, verdict, reason string }{
		{"198.18.0.7", "out-of-scope", "198.18.0.7 is an address of the node itself"},
		{"2001:db8:18::7", "out-of-scope", "2001:db8:18::7 is an address of the node itself"},
		{"127.9.9.9", "out-of-scope", "is an address of the node itself"},
		{"192.0.2.7 --from 198.18.0.7", "out-of-scope", "the source 198.18.0.7 is the node itself"},
		{"192.0.2.7", "masquerade", ""},
		{"198.20.0.1", "masquerade", ""},
		{"2001:db8:19::1", "masquerade", ""},
	} {
		e := n.explain(t, strings.Fields(q.args)...)
		if e.Verdict != q.verdict || !strings.Contains(e.Reason, q.reason) || !e.agrees() {
			t.Errorf("explain %s: %s, kernel %s: %s; want %s: %s", q.args, e.Verdict, e.kernel(), e.Reason, q.verdict, q.reason)
		}
	}
}

// TestThirdPartyExamples has rules about which earlier versions said the opposite: a verdict map, a negated
// interface and an interface that does not exist. explain agrees with packets, and doctor and status with
// explain.
func TestThirdPartyExamples(t *testing.T) {
	const base = "type nat hook postrouting priority srcnat; policy accept; "
	for _, o := range []struct {
		thirdPartyRules
		overrides bool
		finding   string
	}{
		{thirdPartyRules{name: "a verdict map", nft: "table ip other {\nchain d { masquerade; }\nchain c { " + base + `oifname vmap { "lan" : jump d }; }` + "\n}\n"},
			true, "problem: foreign-masquerade\n"},
		{thirdPartyRules{name: "a negated interface", nft: "table ip other {\nchain c { " + base + `oifname != "mgmt0" return; snat to 10.244.0.2; }` + "\n}\n"},
			false, "notice: foreign-masquerade-possible\n"},
		{thirdPartyRules{name: "an interface that does not exist", variant: "nft", lines: "-A POSTROUTING -o wg0 -j MASQUERADE"},
			false, "notice: foreign-masquerade-possible\n"},
	} {
		t.Run(o.name, func(t *testing.T) {
			n := newNode(t, backends()[0])
			n.conflist(t, "podnet", nil)
			p := n.pod(t, "podnet")
			o.load(t, n)
			to := netip.MustParseAddr("10.9.9.9")
			seen, err := p.SendUDP(netip.AddrPortFrom(to, topology.EchoPort))
			must(t, err)
			assert.Equal(t, "the node's address is seen", seen.Source.Addr() != p.addr(to), o.overrides)
			e := n.explain(t, to.String(), "--from", p.addr(to).String())
			if e.Verdict != "exempt" || e.overridden() != o.overrides || e.agrees() == o.overrides {
				t.Errorf("explain: %s, kernel %s, overridden by %q; packets are overridden: %t", e.Verdict, e.kernel(), e.OverriddenBy, o.overrides)
			}
			for _, command := range []string{"doctor", "status"} {
				text, _, _ := n.reconciler(t, command)
				_, id, _ := strings.Cut(strings.TrimSpace(o.finding), ": ")
				isProblem := strings.Contains(text, "foreign-masquerade") && !strings.Contains(text, "foreign-masquerade-possible")
				if !strings.Contains(text, id) || isProblem != o.overrides || command == "doctor" && !strings.Contains(text, o.finding) {
					t.Errorf("%s does not have the finding %q:\n%s", command, o.finding, text)
				}
			}
		})
	}
}

// TestExplainUntracked has a rule of table raw that keeps packets of a pod from connection tracking: no rule masquerades
// them, and explain does not say that one does.
func TestExplainUntracked(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.conflist(t, "podnet", nil)
		p := n.pod(t, "podnet")
		to := netip.AddrPortFrom(netip.MustParseAddr("8.8.8.8"), topology.EchoPort)
		n.feed(t, "*raw\n-A PREROUTING -s "+p.addr(to.Addr()).String()+" -p udp -j CT --notrack\nCOMMIT\n", "iptables-nft-restore", "--noflush")
		seen, err := p.SendUDP(to)
		must(t, err)
		assert.Equal(t, "the source that is seen", seen.Source.Addr(), p.addr(to.Addr()))
		e := n.explain(t, to.Addr().String(), "--from", p.addr(to.Addr()).String())
		if e.Verdict != "masquerade" || e.Kernel != nil || !strings.Contains(e.OverriddenBy, "-p udp -j CT --notrack") {
			t.Errorf("explain: %s, kernel %s, overridden by %q", e.Verdict, e.kernel(), e.OverriddenBy)
		}
		exempt := n.explain(t, "10.9.9.9", "--from", p.addr(to.Addr()).String())
		assert.Equal(t, "agrees about an exempt destination", exempt.agrees(), true)
	})
}

// TestManyThirdPartyRules holds doctor to a second beside 4,000 rules of other programs.
func TestManyThirdPartyRules(t *testing.T) {
	const most = time.Second
	n := newNode(t, backends()[0])
	n.conflist(t, "podnet", nil)
	n.pod(t, "podnet")
	var lines strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&lines, "-A POSTROUTING -s 172.17.%d.%d/32 -d 172.17.%d.%d/32 -p tcp -m tcp --dport 80 -j MASQUERADE\n", i/250, i%250, i/250, i%250)
		fmt.Fprintf(&lines, "-A POSTROUTING -d 10.%d.%d.7/32 -j MASQUERADE\n", i/250, i%250)
	}
	thirdPartyRules{variant: "nft", lines: strings.TrimSpace(lines.String())}.load(t, n)
	c := n.Node.Command(t.Context(), reconcilerProgram(t), "doctor", "-o", "json", "--data-dir", n.dataDir)
	output, err := c.Output()
	must(t, err)
	out, took := string(output), c.ProcessState.UserTime()+c.ProcessState.SystemTime()
	if count := strings.Count(out, "-j MASQUERADE: applies to"); count < 2000 {
		t.Errorf("doctor names %d rules", count)
	}
	t.Logf("doctor took %v of a processor", took)
	if took > most {
		t.Errorf("doctor took %v of a processor, want at most %v", took, most)
	}
}
