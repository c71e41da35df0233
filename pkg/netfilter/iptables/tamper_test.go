// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestTampering sees each thing that can be done to our rules, and repairs it
// without a touch to the rules of others.
func TestTampering(t *testing.T) {
	const chain = "IP-MASQ-AGENT"
	for name, tc := range map[string]struct {
		do   []string // of table nat
		load []string // as iptables-restore
		want []string // the differences, without the family and the chain
	}{
		"jump deleted": {do: []string{"-D POSTROUTING 2"}, want: []string{"missing jump from POSTROUTING: to non-local"}},
		"jump twice": {load: []string{"-I POSTROUTING -m addrtype ! --dst-type LOCAL -j " + chain},
			want: []string{"unexpected jump from POSTROUTING: to non-local"}},
		"jump wider":           {do: []string{"-A POSTROUTING -j " + chain}, want: []string{"unexpected jump from POSTROUTING: of all traffic"}},
		"jump that is no jump": {do: []string{"-A POSTROUTING -g " + chain}, want: []string{"unexpected jump from POSTROUTING: -A POSTROUTING -g " + chain}},
		"jump with a mark": {do: []string{"-A POSTROUTING -m mark --mark 0x1/0x3 -j " + chain},
			want: []string{"unexpected jump from POSTROUTING: -A POSTROUTING -m mark --mark 0x1/0x3 -j " + chain}},
		"jump with an odd comment": {load: []string{`-I POSTROUTING -o lo -m comment --comment "\"a\" \\ 'b' -j ACCEPT" -j ` + chain},
			want: []string{"unexpected jump from POSTROUTING: out lo"}},
		"flushed":           {do: []string{"-F " + chain}, want: []string{"missing rule: to 10.0.0.0/8 return", "missing rule: masquerade random-fully"}},
		"table flushed":     {do: []string{"-F"}, want: []string{"missing rule: to 10.0.0.0/8 return", "missing jump from POSTROUTING: to non-local"}},
		"chain gone":        {do: []string{"-F", "-X " + chain}, want: []string{"missing chain", "missing jump from POSTROUTING: to non-local"}},
		"rule added":        {do: []string{"-A " + chain + " -p tcp -j RETURN"}, want: []string{"unexpected rule: tcp return"}},
		"rule deleted":      {do: []string{"-D " + chain + " 1"}, want: []string{"missing rule: to 169.254.0.0/16 return"}},
		"return to accept":  {do: []string{"-R " + chain + " 1 -j ACCEPT"}, want: []string{"unexpected rule: -A " + chain + " -j ACCEPT"}},
		"inverted":          {do: []string{"-I " + chain + " ! -p tcp -j RETURN"}, want: []string{"unexpected rule: -A " + chain + " ! -p tcp -j RETURN"}},
		"jump onwards":      {do: []string{"-N OTHER", "-I " + chain + " -j OTHER"}, want: []string{"unexpected rule: -A " + chain + " -j OTHER"}},
		"no target":         {do: []string{"-I " + chain}, want: []string{"unexpected rule: -A " + chain}},
		"not random":        {do: []string{"-R " + chain + " 5 -j MASQUERADE"}, want: []string{"missing rule: masquerade random-fully", "unexpected rule: masquerade"}},
		"masquerade first":  {load: []string{":" + chain + " -", "-A " + chain + " -j MASQUERADE --random-fully"}, want: []string{"missing rule: to 10.0.0.0/8 return"}},
		"order":             {do: []string{"-D " + chain + " 5", "-I " + chain + " -j MASQUERADE --random-fully"}, want: []string{"rule out of order: masquerade random-fully"}},
		"somebody's target": {do: []string{"-R " + chain + " 5 -p tcp -j LOG --log-prefix x"}, want: []string{"unexpected rule: -A " + chain + " -p tcp -j LOG --log-prefix x"}},
	} {
		t.Run(name, func(t *testing.T) {
			inEachVariant(t, func(n *node) {
				p := basic(chain) // five rules in each family
				p.Destinations = append(p.Destinations, entriesOf(policy.Exempt, "2001:db8::/32", "3fff::/20")...)
				want := desired(policy.OwnedBy(owner), p)
				for _, f := range policy.Families() {
					n.load(f, ":FOREIGN -", "-A POSTROUTING -p udp -j FOREIGN")
				}
				n.apply(want)
				saved := map[policy.Family]string{}
				for _, f := range policy.Families() {
					saved[f] = n.save(f)
					for _, c := range tc.do {
						n.iptables(f, c)
					}
					if len(tc.load) > 0 {
						n.load(f, tc.load...)
					}
				}
				n.agreesWithListing(chain)
				diff := policy.Compare(want, n.observe(refs(want))).String()
				for _, w := range tc.want {
					if !strings.Contains(diff, ": "+w) {
						n.Errorf("difference is not seen: %s in\n%s", w, diff)
					}
				}
				n.apply(want)
				n.holds(want)
				n.idle("a second Apply", func() { n.apply(want) })
				if name == "table flushed" || name == "flushed" || name == "chain gone" || name == "jump onwards" {
					return // others' rules went too, or came
				}
				for _, f := range policy.Families() {
					if diff := cmp.Diff(sortedLines(saved[f]), sortedLines(n.save(f))); diff != "" {
						n.Errorf("%s: not as before (-before +after):\n%s", f, diff)
					}
				}
			})
		})
	}
}

// TestBaseChainWithoutEffect: it is reported, nothing is written then, and the
// chain can be removed all the same.
func TestBaseChainWithoutEffect(t *testing.T) {
	const chain = "IP-MASQ-AGENT"
	for name, spoil := range map[string]func(*node, policy.Family){
		"policy drop": func(n *node, f policy.Family) { n.load(f, ":POSTROUTING DROP [0:0]") },
		"dormant":     func(n *node, f policy.Family) { n.runNFT(f, "add table FAMILY nat { flags dormant; }") },
	} {
		t.Run(name, func(t *testing.T) {
			inEachVariant(t, func(n *node) {
				if name == "dormant" && n.choice.Variant == netfilter.VariantLegacy {
					return // which knows no such thing
				}
				want := desired(policy.OwnedBy(owner), basic(chain))
				n.apply(want)
				for _, f := range policy.Families() {
					if err := n.CanWrite(n.Context(), f); err != nil {
						n.Errorf("%s: not able to write: %v", f, err)
					}
					spoil(n, f)
					if err := n.CanWrite(n.Context(), f); err == nil {
						n.Errorf("%s: able to write what has no effect", f)
					}
				}
				if diff := policy.Compare(want, n.observe(refs(want))); len(diff) != len(policy.Families()) {
					n.Errorf("differences:\n%s", diff)
				}
				n.idle("Apply without effect", func() {
					if err := n.Apply(n.Context(), want, netfilter.Observation{}, nil); err == nil {
						n.Error("Apply does not fail")
					}
				})
				if err := n.Remove(n.Context(), refs(want), nil); err != nil {
					n.Error(err)
				}
				if got := n.observe(refs(want)); len(got.Chains) > 0 {
					n.Errorf("still there: %v", got.Chains)
				}
			})
		})
	}
}

func sortedLines(s string) []string {
	return slices.Sorted(strings.Lines(s))
}

// TestAgentFindsOurJump runs what ip-masq-agent runs to see if its jump is there.
func TestAgentFindsOurJump(t *testing.T) {
	inEachVariant(t, func(n *node) {
		n.apply(desired(policy.OwnedBy(owner), basic("IP-MASQ-AGENT")))
		for _, f := range policy.Families() {
			out, err := n.command(f, "", "", "-w", "-t", "nat", "-C", "POSTROUTING", "-m", "comment", "--comment",
				"ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain",
				"-m", "addrtype", "!", "--dst-type", "LOCAL", "-j", "IP-MASQ-AGENT")
			if err != nil {
				n.Errorf("%s: %v: %s", f, err, out)
			}
		}
	})
}

// TestAdoption reads chains as the agents write them, and takes them over.
func TestAdoption(t *testing.T) {
	const (
		local = `-m comment --comment "ip-masq-agent: local traffic is not subject to MASQUERADE" `
		last  = `-m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" `
	)
	for name, comment := range map[string]string{
		"v1": `"` + agentJumpComment("IP-MASQ-AGENT") + `"`,
		"v2": `"\"` + agentJumpComment("IP-MASQ-AGENT") + `\""`,
	} {
		t.Run(name, func(t *testing.T) {
			inEachVariant(t, func(n *node) {
				for _, f := range policy.Families() {
					private := map[policy.Family]string{policy.IPv4: "10.0.0.0/8", policy.IPv6: "fd00::/8"}[f]
					n.load(f, ":IP-MASQ-AGENT -",
						"-A POSTROUTING -m comment --comment "+comment+" -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT",
						"-A IP-MASQ-AGENT "+local+"-d "+f.LinkLocal().String()+" -j RETURN",
						"-A IP-MASQ-AGENT "+local+"-d "+private+" -j RETURN",
						"-A IP-MASQ-AGENT -p tcp -m statistic --mode random --probability 0.40000000000 "+last+"-j MASQUERADE --to-ports 1024-29999 --random-fully",
						"-A IP-MASQ-AGENT -p tcp "+last+"-j MASQUERADE --to-ports 32768-65535 --random-fully",
						"-A IP-MASQ-AGENT "+last+"-j MASQUERADE --random-fully")
				}
				n.agreesWithListing("IP-MASQ-AGENT")
				got := n.observe(bothFamilies("IP-MASQ-AGENT"))
				for _, c := range got.Chains {
					if !c.HoldsOnly(policy.Return, policy.Masquerade) || len(c.Rules) != 5 || c.Owner != (policy.Owner{}) {
						n.Errorf("%s reads as %+v", c.Family, c)
					}
					if share := float64(c.Rules[2].Share) / policy.ShareUnit; share < 0.3999 || share > 0.4001 {
						n.Errorf("%s: share %v", c.Family, share)
					}
				}
				want := desired(policy.OwnedBy(owner), basic("IP-MASQ-AGENT"))
				n.apply(want)
				n.holds(want)
				for _, f := range policy.Families() {
					out, err := n.command(f, "", "", "-t", "nat", "-S", "POSTROUTING")
					if err != nil || strings.Count(out, "-j IP-MASQ-AGENT") != 1 || !strings.Contains(out, "--comment "+comment) {
						n.Errorf("the agent's jump did not stay: %v\n%s", err, out)
					}
				}
			})
		})
	}
}
