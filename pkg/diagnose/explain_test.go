// SPDX-License-Identifier: Apache-2.0

package diagnose_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// want is what matters of an explanation, in one line.
func line(e diagnose.Explanation) string {
	prefix, origin := "-", "-"
	if e.Prefix != nil {
		prefix = e.Prefix.String()
	}
	if e.Origin != nil {
		origin = e.Origin.Key + " by " + e.Origin.Source
		if e.Origin.Index != nil {
			origin = fmt.Sprintf("%s[%d] by %s", e.Origin.Key, *e.Origin.Index, e.Origin.Source)
		}
		if e.Origin.File != "" {
			origin += " in " + e.Origin.File
		}
	}
	return fmt.Sprintf("%q %s %s | %s | %s | kernel %t | %s", e.Chain, e.Family, e.Verdict, prefix, origin, e.Kernel == thirdparty.Yes, e.Rule)
}

func TestOrigins(t *testing.T) {
	podnet := network("podnet", "A", exempting("10.0.0.0/8", "192.168.0.0/16"), masquerading("10.1.0.0/16"), fromOnly("10.244.0.0/16"))
	second := network("second", "A", exempting("192.168.0.0/16", "10.0.0.0/8"), fromOnly("10.244.0.0/16"))
	files := agentFiles("A",
		file("/etc/config/ip-masq-agent", exempting("172.20.0.0/16")),
		file("/etc/config/ip-masq-more", exempting("172.22.0.0/16", "172.23.0.0/16", "172.24.0.0/16", "172.21.0.0/16"),
			func(s *policy.SourcePolicy) { s.MasqueradeHost = new(false) }))
	n := newNode(podnet, second, files)
	n.finder.ConfDir = confDir(t, map[string]string{
		"10-podnet.conflist": conflist("podnet", `, "masqChain": "A", "sourceCIDRs": ["10.244.0.0/16"],
			"nonMasqueradeCIDRs": ["10.0.0.0/8", "192.168.0.0/16"], "masqueradeCIDRs": ["10.1.0.0/16"]`),
		// It changed since it was applied.
		"30-second.conflist": conflist("second", `, "masqChain": "A", "nonMasqueradeCIDRs": ["10.0.0.0/8"]`),
	})
	for dst, want := range map[string]string{
		"8.8.8.8":     `"A" ipv4 masquerade | - | - | kernel true | masquerade random-fully`,
		"10.9.9.9":    `"A" ipv4 exempt | 10.0.0.0/8 | nonMasqueradeCIDRs[0] by network "podnet" in /etc/cni/net.d/10-podnet.conflist | kernel true | to 10.0.0.0/8 return`,
		"192.168.1.1": `"A" ipv4 exempt | 192.168.0.0/16 | nonMasqueradeCIDRs[1] by network "podnet" in /etc/cni/net.d/10-podnet.conflist | kernel true | to 192.168.0.0/16 return`,
		"10.1.1.1":    `"A" ipv4 masquerade | 10.1.0.0/16 | masqueradeCIDRs[0] by network "podnet" in /etc/cni/net.d/10-podnet.conflist | kernel true | to 10.1.0.0/16 masquerade random-fully`,
		"172.20.1.1":  `"A" ipv4 exempt | 172.20.0.0/16 | nonMasqueradeCIDRs[0] by the agent files in /etc/config/ip-masq-agent | kernel true | to 172.20.0.0/16 return`,
		"172.21.1.1":  `"A" ipv4 exempt | 172.21.0.0/16 | nonMasqueradeCIDRs[3] by the agent files in /etc/config/ip-masq-more | kernel true | to 172.21.0.0/16 return`,
		"169.254.1.1": `"A" ipv4 exempt | 169.254.0.0/16 | masqLinkLocal by built in | kernel true | to 169.254.0.0/16 return`,
		"239.1.1.1":   `"A" ipv4 exempt | 224.0.0.0/4 |  by built in | kernel true | to 224.0.0.0/4 return`,
		"2001:db8::1": `"A" ipv6 out-of-scope | - | enableIPv6 by built in | kernel true | `,
	} {
		assert.Equal(t, fmt.Sprintf("to %s", dst), line(n.to(dst)), want)
	}
	for _, tt := range []struct{ src, out, want string }{
		{"10.244.0.2", "", `"A" ipv4 masquerade | - | - | kernel true | masquerade random-fully`},
		{"10.245.0.2", "", `"A" ipv4 out-of-scope | - | sourceCIDRs by network "podnet" in /etc/cni/net.d/10-podnet.conflist | kernel true | `},
		{"10.244.0.1", "", `"A" ipv4 out-of-scope | - | masqueradeHost by the agent files in /etc/config/ip-masq-more | kernel true | `},
	} {
		q := question("8.8.8.8", tt.src, tt.out)
		q.SrcLocal = tt.src == "10.244.0.1"
		got := line(n.explain(q))
		assert.Equal(t, fmt.Sprintf("from %s", tt.src), got, tt.want)
	}
}

func TestDoesTheKernelAgree(t *testing.T) {
	pods := func(s *policy.SourcePolicy) { s.SourceCIDRs = cidrs("10.244.0.0/16") }
	first := func(r policy.Rule) func(*policy.Chain) {
		return func(c *policy.Chain) { c.Rules = append([]policy.Rule{r}, c.Rules...) }
	}
	unrecognized := policy.Rule{Verdict: policy.Unrecognized, Text: "-j LOG"}
	for _, tt := range []struct {
		name                 string
		change               func(*node)
		dst                  string
		kernel               bool
		rule, drift, problem string // drift and problem: a part of it; "": none
	}{
		{"right", func(*node) {}, "8.8.8.8", true, "masquerade random-fully", "", ""},
		{"right, exempt", func(*node) {}, "10.1.1.1", true, "to 10.0.0.0/8 return", "", ""},
		{"a deleted jump", func(n *node) {
			n.tamper(policy.IPv4, "A", func(c *policy.Chain) { c.Jumps = nil })
		}, "8.8.8.8", false, "", "ipv4 A: missing jump from POSTROUTING: from 10.244.0.0/16 to non-local", ""},
		{"a deleted jump, exempt all the same", func(n *node) {
			n.tamper(policy.IPv4, "A", func(c *policy.Chain) { c.Jumps = nil })
		}, "10.1.1.1", true, "", "missing jump", ""},
		{"a deleted rule", func(n *node) {
			n.tamper(policy.IPv4, "A", func(c *policy.Chain) { c.Rules = c.Rules[4:] })
		}, "10.1.1.1", false, "masquerade random-fully", "missing rule: to 10.0.0.0/8 return", ""},
		{"a wrong order", func(n *node) {
			n.tamper(policy.IPv4, "A", func(c *policy.Chain) { c.Rules[3], c.Rules[5] = c.Rules[5], c.Rules[3] })
		}, "10.1.1.1", false, "masquerade random-fully", "out of order", ""},
		{"a chain that is gone", func(n *node) {
			g := n.in(inIPTables)
			g.Observed = policy.Ruleset{}
			g.Diff = policy.Compare(g.Desired, g.Observed)
		}, "8.8.8.8", false, "", "ipv4 A: missing chain", ""},
		{"a third-party rule before", func(n *node) {
			n.tamper(policy.IPv4, "A", first(unrecognized))
		}, "8.8.8.8", false, "-j LOG", "unexpected rule: -j LOG", "unrecognized rule"},
		{"a third-party rule behind", func(n *node) {
			n.tamper(policy.IPv4, "A", func(c *policy.Chain) { c.Rules = append(c.Rules, unrecognized) })
		}, "8.8.8.8", true, "masquerade random-fully", "unexpected rule: -j LOG", ""},
		{"another chain differs", func(n *node) {
			n.tamper(policy.IPv4, "B", func(c *policy.Chain) { c.Jumps = nil })
		}, "8.8.8.8", false, "masquerade random-fully", "", "chain B"},
		{"another family differs", func(n *node) {
			n.tamper(policy.IPv6, "B", func(c *policy.Chain) { c.Jumps = nil })
		}, "8.8.8.8", true, "masquerade random-fully", "", ""},
		{"not read", func(n *node) {
			n.in(inIPTables).Observed = policy.Ruleset{}
			n.view.Chains[0].Err = errors.New("read the rules of chain A: no permission")
		}, "8.8.8.8", false, "", "", "no permission"},
		{"not read, and exempt", func(n *node) {
			n.in(inIPTables).Observed = policy.Ruleset{}
			n.view.Chains[0].Err = errors.New("read the rules of chain A: no permission")
		}, "10.1.1.1", false, "", "", "no permission"},
		{"no backend", func(n *node) {
			n.view.Chains[0] = enforce.Chain{Policy: n.view.Chains[0].Policy, Err: errors.New("choose a backend for chain A: none")}
		}, "8.8.8.8", false, "", "", "choose a backend"},
		{"something else in our table", func(n *node) {
			n.inKernel(inNFTables, nil, policy.UnrecognizedObject{Family: policy.IPv4, Text: "table has flags 0x1 (1: dormant, 2: owner, 4: persist)"})
		}, "8.8.8.8", false, "masquerade random-fully", "", "chain B"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(network("a", "A", pods), network("b", "B", pods, inNFT, enableIPv6))
			tt.change(n)
			e := n.to(tt.dst)
			drift := strings.Join(e.Drift, "\n")
			if e.Chain != "A" || e.Kernel != thirdparty.AnswerOf(tt.kernel) || e.Rule != tt.rule || !tells(drift, tt.drift) || !tells(e.Problem, tt.problem) {
				t.Errorf("chain %s, kernel %v, rule %q, problem %q, drift\n%s\nwant chain A, %t, %q, %q, %q",
					e.Chain, e.Kernel, e.Rule, e.Problem, drift, tt.kernel, tt.rule, tt.problem, tt.drift)
			}
		})
	}
}

// tells reports whether the text has the part, or is empty where none is wanted.
func tells(text, part string) bool {
	if part == "" {
		return text == ""
	}
	return strings.Contains(text, part)
}

// judge judges each packet alike. asked has what it was asked about.
type judge struct {
	verdict thirdparty.Verdict
	err     error
	owned   func(thirdparty.Place) bool
	binds   func(thirdparty.Place) thirdparty.Answer
	asked   []thirdparty.Packet
}

func (j *judge) read(_ policy.Family, owned func(thirdparty.Place) bool) (diagnose.Rules, error) {
	j.owned = owned
	return j, j.err
}

func (j *judge) Judge(p thirdparty.Packet, binds func(thirdparty.Place) thirdparty.Answer) thirdparty.Verdict {
	j.asked, j.binds = append(j.asked, p), binds
	return j.verdict
}

// rule is a rule of another program, in a chain of the name.
func rule(chain string) *thirdparty.Rule {
	at := thirdparty.Place{Backend: policy.IPTables, Variant: "nft", Family: policy.IPv4, Table: "nat", Chain: chain}
	return thirdparty.MasqueradeRule(at)
}

// textOf is how rule is printed.
func textOf(chain string) string {
	if chain == "" {
		return ""
	}
	return "iptables (nft), ipv4, table nat: -A " + chain + " -j MASQUERADE"
}

var untouched, ownedDecides = thirdparty.Outcome{Fate: thirdparty.Untouched}, thirdparty.Outcome{Fate: thirdparty.Owned}

func masqueradedBy(chain string) thirdparty.Outcome {
	return thirdparty.Outcome{Fate: thirdparty.Masqueraded, Rule: rule(chain)}
}

func translatedByS(to string) thirdparty.Outcome {
	o := thirdparty.Outcome{Fate: thirdparty.Translated, Rule: rule("S")}
	if to != "" {
		o.To = netip.MustParsePrefix(to)
	}
	return o
}

// TestOverridden: what third-party rules decide before the chains of the policies do.
func TestOverridden(t *testing.T) {
	type outcomes = []thirdparty.Outcome
	for _, tt := range []struct {
		name      string
		dst, from string
		outcomes  outcomes
		bypass    string
		kernel    thirdparty.Answer
		by, rule  string
	}{
		{"none", "10.1.1.1", "", outcomes{untouched}, "", thirdparty.Yes, "", "to 10.0.0.0/8 return"},
		{"exempt, masqueraded", "10.1.1.1", "", outcomes{masqueradedBy("M")}, "", thirdparty.No, "M", "to 10.0.0.0/8 return"},
		{"exempt, masqueraded perhaps", "10.1.1.1", "", outcomes{masqueradedBy("M"), untouched}, "", thirdparty.Perhaps, "M", "to 10.0.0.0/8 return"},
		{"exempt, an address of its own", "10.1.1.1", "10.244.0.9", outcomes{translatedByS("10.244.0.9/32")}, "", thirdparty.Yes, "", textOf("S")},
		{"exempt, an address that is not known", "10.1.1.1", "10.244.0.9", outcomes{translatedByS("")}, "", thirdparty.Perhaps, "S", "to 10.0.0.0/8 return"},
		{"exempt, another address", "10.1.1.1", "10.244.0.9", outcomes{translatedByS("192.0.2.1/32")}, "", thirdparty.No, "S", "to 10.0.0.0/8 return"},
		{"masqueraded, and so before", "8.8.8.8", "", outcomes{masqueradedBy("M")}, "", thirdparty.Yes, "", textOf("M")},
		{"masqueraded, and so perhaps", "8.8.8.8", "", outcomes{masqueradedBy("M"), ownedDecides}, "", thirdparty.Yes, "", "masquerade random-fully"},
		{"masqueraded, and to another address", "8.8.8.8", "", outcomes{translatedByS("192.0.2.1/32")}, "", thirdparty.No, "S", "masquerade random-fully"},
		{"masqueraded, and kept from it", "8.8.8.8", "10.244.0.9", outcomes{untouched}, "K", thirdparty.No, "K", "masquerade random-fully"},
		{"masqueraded, and kept from it perhaps", "8.8.8.8", "10.244.0.9", outcomes{untouched, ownedDecides}, "K", thirdparty.Perhaps, "K", "masquerade random-fully"},
		{"masqueraded, and dropped", "8.8.8.8", "", outcomes{{Fate: thirdparty.Dropped, Rule: rule("D")}}, "", thirdparty.No, "D", "masquerade random-fully"},
		{"out of scope, masqueraded", "8.8.8.8", "192.0.2.7", outcomes{masqueradedBy("M")}, "", thirdparty.No, "M", ""},
		{"of the node, masqueraded", "8.8.8.8", "192.0.2.1", outcomes{masqueradedBy("M")}, "", thirdparty.Perhaps, "M", ""},
		{"masqueraded, and not tracked", "8.8.8.8", "10.244.0.9", outcomes{ownedDecides}, "", thirdparty.Perhaps, "N", "masquerade random-fully"},
		{"exempt, and not tracked", "10.1.1.1", "10.244.0.9", outcomes{untouched}, "", thirdparty.Yes, "", "to 10.0.0.0/8 return"},
		{"to the node itself", "192.0.2.1", "", outcomes{masqueradedBy("M")}, "", thirdparty.Yes, "", ""},
		{"not read", "8.8.8.8", "", outcomes{ownedDecides}, "", thirdparty.Perhaps, "", "masquerade random-fully"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(network("a", "A", fromOnly("10.244.0.0/16"), func(s *policy.SourcePolicy) { s.OutputInterfaces = []string{"eth0"} }))
			j := &judge{verdict: thirdparty.Verdict{Outcomes: tt.outcomes}}
			if tt.bypass != "" {
				j.verdict.Bypasses = []*thirdparty.Rule{rule(tt.bypass)}
			}
			if tt.name == "not read" {
				j.err = errors.New("no permission")
			}
			q := question(tt.dst, tt.from, "")
			q.DstLocal, q.SrcLocal, q.ThirdParty, q.Mark = tt.dst == "192.0.2.1", tt.from == "192.0.2.1", j.read, 7
			if strings.HasSuffix(tt.name, "not tracked") {
				raw := &judge{verdict: thirdparty.Verdict{Outcomes: outcomes{untouched}, Untrackers: []*thirdparty.Rule{rule("N")}}}
				q.BeforeConntrack = func(policy.Family) (diagnose.Rules, error) { return raw, nil }
			}
			asked := thirdparty.Packet{Src: netip.MustParsePrefix("10.244.0.0/16"), Dst: thirdparty.HostPrefix(q.Dst), SrcLocal: thirdparty.Perhaps, Out: "eth0", Mark: 7}
			if tt.from != "" {
				asked.Src, asked.SrcLocal = thirdparty.HostPrefix(q.Src), thirdparty.AnswerOf(q.SrcLocal)
			}
			e := n.explain(q)
			if e.Kernel != tt.kernel || e.OverriddenBy != textOf(tt.by) || e.Rule != tt.rule || (j.err != nil) != strings.Contains(e.Problem, "no permission") {
				t.Errorf("%s: kernel %v, overridden by %q, rule %q, problem %q; want %v, %q, %q",
					e.Verdict, e.Kernel, e.OverriddenBy, e.Rule, e.Problem, tt.kernel, textOf(tt.by), tt.rule)
			}
			if q.DstLocal {
				return
			}
			if len(j.asked) != 1 || j.asked[0] != asked {
				t.Errorf("asked about %+v, want %+v", j.asked, asked)
			}
			for _, c := range []struct {
				thirdparty.Place
				is bool
			}{
				{thirdparty.Place{Backend: policy.IPTables, Variant: "nft", Family: policy.IPv4, Table: "nat", Chain: "A"}, true},
				{thirdparty.Place{Backend: policy.IPTables, Variant: "legacy", Family: policy.IPv4, Table: "nat", Chain: "A"}, false},
				{thirdparty.Place{Backend: policy.IPTables, Variant: "nft", Family: policy.IPv6, Table: "nat", Chain: "A"}, false},
				{thirdparty.Place{Backend: policy.IPTables, Variant: "nft", Family: policy.IPv4, Table: "nat", Chain: "OLD"}, false},
				{thirdparty.Place{Backend: policy.NFTables, Family: policy.IPv4, Table: "ip-masq", Chain: "masq-A"}, false},
			} {
				assert.Equal(t, fmt.Sprintf("%+v is owned", c.Place), j.owned(c.Place), c.is)
				if c.is {
					masquerades := thirdparty.AnswerOf(e.Verdict == policy.ActionMasquerade)
					assert.Equal(t, fmt.Sprintf("%+v decides", c.Place), j.binds(c.Place), masquerades)
				}
			}
		})
	}
}

// TestGuard: what guard and enforceExempt do with packets, and when they do not.
func TestGuard(t *testing.T) {
	on := func(s *policy.SourcePolicy) {
		s.Guard, s.EnforceExempt, s.PodCIDRs = policy.GuardCount, new(true), cidrs("10.244.0.0/16")
	}
	off := func(s *policy.SourcePolicy) { s.PodCIDRs = cidrs("10.244.0.0/16") }
	drift := func(n *node) {
		n.view.Guard.Diff = policy.Diff{{Kind: policy.GuardChange, Family: policy.IPv4, Chain: "A", Text: "counter"}}
	}
	lost := func(n *node) {
		n.tamper(policy.IPv4, "A", func(c *policy.Chain) { c.Rules = nil })
	}
	const bypass = 0x4000
	for _, tt := range []struct {
		name      string
		key       func(*policy.SourcePolicy)
		change    func(*node)
		dst, from string
		mark      policy.Mark
		guard     policy.GuardMode
		binds     bool // enforceExempt
	}{
		{"masqueraded", on, nil, "8.8.8.8", "10.244.0.9", 0, policy.GuardCount, false},
		{"masqueraded, any source", on, nil, "8.8.8.8", "", 0, policy.GuardCount, false},
		{"masqueraded, not of a pod", on, nil, "8.8.8.8", "172.17.0.9", 0, "", false},
		{"masqueraded, the guard differs", on, drift, "8.8.8.8", "10.244.0.9", 0, "", false},
		{"masqueraded, of another chain", on, func(n *node) { n.view.Guard.Desired[0].Chain = "B" }, "8.8.8.8", "10.244.0.9", 0, "", false},
		{"exempt, multicast", on, nil, "239.1.2.3", "10.244.0.9", 0, "", true},
		{"masqueraded, without its rules", on, lost, "8.8.8.8", "10.244.0.9", 0, policy.GuardCount, false},
		{"exempt", on, nil, "10.1.1.1", "10.244.0.9", 0, "", true},
		{"exempt, a mark that bypasses it", on, nil, "10.1.1.1", "10.244.0.9", bypass, "", false},
		{"exempt, another mark", on, nil, "10.1.1.1", "10.244.0.9", 0x10, "", true},
		{"exempt, any source", on, nil, "10.1.1.1", "", 0, "", true},
		{"exempt, not of a pod", on, nil, "10.1.1.1", "172.17.0.9", 0, "", false},
		{"exempt, an address of the node among those of pods", on, nil, "10.1.1.1", "10.244.0.1", 0, "", true},
		{"exempt, the guard differs", on, drift, "10.1.1.1", "10.244.0.9", 0, "", false},
		{"exempt, without the key", off, nil, "10.1.1.1", "10.244.0.9", 0, "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(network("a", "A", tt.key))
			if tt.change != nil {
				tt.change(n)
			}
			j := &judge{verdict: thirdparty.Verdict{Outcomes: []thirdparty.Outcome{untouched}}}
			q := question(tt.dst, tt.from, "")
			q.SrcLocal, q.Mark, q.ThirdParty = tt.from == "10.244.0.1", tt.mark, j.read
			e := n.explain(q)
			assert.Equal(t, "guard", e.Guard, tt.guard)
			enforce := thirdparty.Place{Backend: policy.NFTables, Family: policy.IPv4, Table: "ip-masq-guard", Chain: "enforce"}
			assert.Equal(t, "the guard's table is owned", j.owned(enforce), true)
			assert.Equal(t, "the guard's table decides", j.binds(enforce), thirdparty.AnswerOf(tt.binds))
			drifted := len(n.view.Guard.Diff)+len(n.in(inIPTables).Diff) > 0
			if drifted != (len(e.Drift) > 0) {
				t.Errorf("drift %q", e.Drift)
			}
		})
	}
}
