// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestReadingsAreCompared: amid commits a reading ends with the second one that finds the same, unrecognized rules
// included.
func TestReadingsAreCompared(t *testing.T) {
	n := newNode(t, netfilter.VariantNFT)
	n.load(policy.IPv4, ":X -", "-A X -p tcp -m tcp --dport 80 -j RETURN", "-A POSTROUTING -m mark --mark 0x1 -j X")
	read := func() table {
		return assert.Must(n.driver.nft.read(policy.IPv4, []string{"X"}))(t)
	}
	first, second := read(), read()
	n.load(policy.IPv4, "-A X -p udp -j RETURN")
	if third := read(); !first.same(second) || first.same(third) {
		t.Errorf("readings are the same: %v, want true; after another rule: %v", first.same(second), first.same(third))
	}
}

// TestObserveUnrecognizedRules loads rules of all kinds. None may be decoded as one that
// matches more than what iptables shows.
func TestObserveUnrecognizedRules(t *testing.T) {
	const recognized = 64
	newer := policy.Owner{Schema: policy.RulesSchema + 1, DataDir: "/x"}
	inEachVariant(t, func(n *node) {
		for _, f := range policy.Families() {
			prefix := map[policy.Family]string{policy.IPv4: "10.0.0.0/8", policy.IPv6: "fd00::/8"}[f]
			// iptables 1.8.7 takes 255.0.255.0 for /8.
			noPrefix := map[policy.Family]string{policy.IPv4: "10.0.0.0/255.1.255.0", policy.IPv6: "fd00::/ff01:ff::"}[f]
			rules := []string{
				"-d " + prefix + " -j RETURN", "! -d " + prefix + " -j RETURN", "! -s " + prefix + " -j RETURN",
				"-d " + noPrefix + " -j RETURN", "-s " + noPrefix + " -j RETURN",
				"-o eth0 -j RETURN", "-o eth+ -j RETURN", "! -o eth0 -j RETURN", "! -o eth+ -j RETURN", "-i eth0 -j RETURN", "-i eth+ -j RETURN",
				"-o + -j RETURN", "-p tcp -j RETURN", "! -p tcp -j RETURN", "-p 47 -j RETURN", "-p tcp -m tcp --dport 80 -j RETURN",
				"-p udp -m multiport --dports 1,2 -j RETURN", "-m mark --mark 0x1/0x2 -j RETURN", "-m mark ! --mark 0x1 -j RETURN",
				"-m addrtype --dst-type LOCAL -j RETURN", "-m addrtype ! --dst-type LOCAL -j RETURN", "-m addrtype ! --src-type LOCAL -j RETURN",
				"-m addrtype --src-type LOCAL ! --dst-type LOCAL -j RETURN", "-m addrtype ! --dst-type LOCAL,UNICAST -j RETURN",
				"-m addrtype ! --dst-type UNICAST -j RETURN", "-m addrtype ! --dst-type LOCAL --limit-iface-out -j RETURN",
				"-m addrtype ! --dst-type LOCAL -m addrtype ! --src-type LOCAL -j RETURN",
				"-m statistic --mode random --probability 0.25 -j RETURN", "-m statistic --mode random ! --probability 0.25 -j RETURN",
				"-m statistic --mode nth --every 3 --packet 1 -j RETURN", "-m statistic --mode nth ! --every 3 --packet 1 -j RETURN",
				"-m statistic --mode random --probability 0 -j RETURN", "-m statistic --mode random --probability 1 -j RETURN",
				"-m statistic --mode random --probability 0.5 -m statistic --mode random --probability 0.5 -j RETURN",
				`-m comment --comment "" -j RETURN`, `-m comment --comment "a \" \\ ' b" -j RETURN`,
				`-m comment --comment "` + newer.Comment() + `" -j RETURN`, "-m limit --limit 5/min -j RETURN",
				"-m conntrack --ctstate NEW -j RETURN", "-m string --string -j --algo bm -j RETURN",
				"-j MASQUERADE", "-j MASQUERADE --random", "-j MASQUERADE --random-fully", "-p tcp -j MASQUERADE --to-ports 5",
				"-p tcp -j MASQUERADE --to-ports 5-9 --random", "-p sctp -j MASQUERADE --to-ports 5-9 --random-fully",
				"-j ACCEPT", "-j OTHER", "-g OTHER", "-j LOG", "-j MARK --set-mark 1", "-j NFLOG --nflog-group 3", "",
			}
			if f == policy.IPv4 {
				rules = append(rules, "-f -j RETURN", "! -f -j RETURN")
			}
			to, port, last := "-j SNAT --to-source 192.0.2.1", "192.0.2.1:5-9", "192.0.2.9"
			if f == policy.IPv6 {
				to, port, last = "-j SNAT --to-source 2001:db8::1", "[2001:db8::1]:5-9", "2001:db8::9"
			}
			rules = append(rules, to, "-p udp -j SNAT --to-source "+port+" --random-fully", to+"-"+last, to+" --persistent", to+" --random")
			lines := []string{":X -", ":OTHER -"}
			for _, r := range rules {
				lines = append(lines, "-A X "+r)
				// POSTROUTING knows no input interface.
				if jump, ok := strings.CutSuffix(r, "-j RETURN"); ok && !strings.HasPrefix(r, "-i") {
					lines = append(lines, "-A POSTROUTING "+jump+"-j X", "-A POSTROUTING "+jump+"-g X")
				}
			}
			n.load(f, lines...)
		}
		assert.Equal(n, "recognized rules and jumps", n.agreesWithListing("X"), recognized)
		got := n.observe(bothFamilies("X"))
		for _, c := range got.Chains {
			assert.Equal(n, "owner", c.Owner, newer)
		}
		want := desired(policy.OwnedBy(owner), basic("X"))
		n.apply(want)
		n.holds(want)
		assert.NoError(n, n.Remove(n.Context(), bothFamilies("X"), nil))
	})
}

// TestObserveCounters: ip6tables-nft-restore does not set counters.
func TestObserveCounters(t *testing.T) {
	n := newNode(t, netfilter.VariantLegacy)
	for _, f := range policy.Families() {
		if out, err := n.command(f, "-restore", "*nat\n:X -\n[7:70] -A X -j RETURN\nCOMMIT\n", "--noflush", "--counters"); err != nil {
			n.Fatal(err, out)
		}
	}
	for _, c := range n.observe(bothFamilies("X")).Chains {
		if len(c.Rules) != 1 || c.Rules[0].Connections != 7 {
			n.Errorf("%s: %+v", c.Family, c.Rules)
		}
	}
}

// TestObserveEmpty reads where nothing is, and leaves it at that.
func TestObserveEmpty(t *testing.T) {
	inEachVariant(t, func(n *node) {
		n.idle("reading", func() {
			if got := n.observe(bothFamilies("IP-MASQ-AGENT")); len(got.Chains) > 0 {
				n.Errorf("got %+v", got)
			}
			assert.NoError(n, n.Remove(n.Context(), bothFamilies("IP-MASQ-AGENT"), nil))
		})
		for _, f := range policy.Families() {
			if used, err := legacyInUse(f, Table); err != nil || used {
				n.Errorf("%s: reading made the table: %v, %v", f, used, err)
			}
		}
	})
}

// TestProgramMissing has the rules but no program: they are read, not written.
func TestProgramMissing(t *testing.T) {
	inEachVariant(t, func(n *node) {
		want := desired(policy.OwnedBy(owner), basic("IP-MASQ-AGENT"))
		n.apply(want)
		n.iptables(policy.IPv4, "-A IP-MASQ-AGENT -p icmp -j RETURN")
		bare := New("/nowhere")
		opened := assert.Must(bare.Open(n.choice))(n)
		got, err := opened.Observe(n.Context(), refs(want))
		assert.NoError(n, err)
		d := policy.Compare(want, got.Rules)
		if len(d) != 1 || !strings.Contains(d.String(), "unexpected rule: return with l4proto 1") {
			n.Errorf("got %s", d)
		}
		err = opened.Apply(n.Context(), want, netfilter.Observation{}, nil)
		assert.ErrorContains(n, err, "find iptables-"+n.choice.Variant+"-restore or iptables-restore: file does not exist")
	})
}

// TestNativeExpressions has rules that nft wrote into the table of iptables.
// iptables shows some of them as rules that match more. How nft encodes a range of addresses depends on its version.
func TestNativeExpressions(t *testing.T) {
	n := newNode(t, "nft")
	want := desired(policy.OwnedBy(owner), basic("IP-MASQ-AGENT"))
	n.apply(want)
	for rule, texts := range map[string][]string{
		"insert rule ip nat IP-MASQ-AGENT ip daddr @s return":                   {"return with destination @s"},
		"insert rule ip nat IP-MASQ-AGENT ip daddr 10.0.0.0/8 ip ttl 64 return": {"to 10.0.0.0/8 return with payload"},
		"insert rule ip nat IP-MASQ-AGENT ip daddr 10.0.0.0-10.0.0.7 return": {
			"return with destination 10.0.0.0-255.255.255.255, destination 0.0.0.0-10.0.0.7", "to 10.0.0.0/29 return", // nft 1.1.7
		},
		"insert rule ip nat POSTROUTING ip saddr @s jump IP-MASQ-AGENT": {"jump IP-MASQ-AGENT with source @s"},
	} {
		shell(t, "nft 'add set ip nat s { type ipv4_addr; }'", "nft '"+rule+"'")
		d := policy.Compare(want, n.observe(refs(want)))
		if len(d) != 1 || !d[0].Unexpected || !slices.Contains(texts, d[0].Text) {
			t.Errorf("%s: %s", rule, d)
		}
		n.apply(want)
		n.holds(want)
	}
	// Old versions of iptables keep the comment beside the rule.
	newer := policy.Owner{Schema: policy.RulesSchema + 1, DataDir: "/old"}
	shell(t, `nft add rule ip nat IP-MASQ-AGENT counter return comment '"`+newer.Comment()+`"'`)
	got := n.observe(refs(want))
	assert.Equal(t, "owner", got.Find(policy.IPv4, "IP-MASQ-AGENT").Owner, newer)
	n.apply(want)
	// What is the same in its native form is the same.
	shell(t, "nft insert rule ip nat POSTROUTING fib daddr type != local jump IP-MASQ-AGENT")
	assert.Equal(t, "differences", policy.Compare(want, n.observe(refs(want))).String(), "ipv4 IP-MASQ-AGENT: unexpected jump from POSTROUTING: to non-local")
}

// TestSavedByNFT loads what nft printed of our rules, as at the next boot. Some
// versions of nft lose part of a rule on the way; that has to be seen.
func TestSavedByNFT(t *testing.T) {
	n := newNode(t, "nft")
	scoped := basic("SCOPED")
	scoped.Sources.Value = prefixList("10.0.0.0/8", "fd00::/11")
	scoped.Interfaces.Value = []string{"eth0", "wl+"}
	scoped.RandomFully.Value = false
	scoped.EnableIPv6.Value = false
	want := desired(policy.Owner{}, scoped)
	n.apply(want)
	shell(t, "nft list ruleset >/run/saved", "nft flush ruleset", "nft -f /run/saved")
	n.holds(want)
}

// TestTampering sees each thing that can be done to our rules, and repairs it
// without a change to other rules.
func TestTampering(t *testing.T) {
	const chain = "IP-MASQ-AGENT"
	for name, tc := range map[string]struct {
		do   []string // of table nat
		load []string // as iptables-restore
		want []string // the differences, without the family and the chain
	}{
		"jump twice": {load: []string{"-I POSTROUTING -m addrtype ! --dst-type LOCAL -j " + chain},
			want: []string{"unexpected jump from POSTROUTING: to non-local"}},
		"jump wider":           {do: []string{"-A POSTROUTING -j " + chain}, want: []string{"unexpected jump from POSTROUTING: of all traffic"}},
		"jump that is no jump": {do: []string{"-A POSTROUTING -g " + chain}, want: []string{"unexpected jump from POSTROUTING: jump " + chain + " with goto"}},
		"jump with a mark": {do: []string{"-A POSTROUTING -m mark --mark 0x1/0x3 -j " + chain},
			want: []string{"unexpected jump from POSTROUTING: jump " + chain + " with mark 0x1/0x3"}},
		"jump with an unusual comment": {load: []string{`-I POSTROUTING -o lo -m comment --comment "\"a\" \\ 'b' -j ACCEPT" -j ` + chain},
			want: []string{"unexpected jump from POSTROUTING: out lo"}},
		"chain gone":       {do: []string{"-F", "-X " + chain}, want: []string{"missing chain", "missing jump from POSTROUTING: to non-local"}},
		"rule added":       {do: []string{"-A " + chain + " -p tcp -j RETURN"}, want: []string{"unexpected rule: tcp return"}},
		"inverted":         {do: []string{"-I " + chain + " ! -p tcp -j RETURN"}, want: []string{"unexpected rule: return with l4proto != 6"}},
		"jump onwards":     {do: []string{"-N OTHER", "-I " + chain + " -j OTHER"}, want: []string{"unexpected rule: jump OTHER"}},
		"no target":        {do: []string{"-I " + chain}, want: []string{"unexpected rule: rule with no verdict"}},
		"not random":       {do: []string{"-R " + chain + " 5 -j MASQUERADE"}, want: []string{"missing rule: masquerade random-fully", "unexpected rule: masquerade"}},
		"masquerade first": {load: []string{":" + chain + " -", "-A " + chain + " -j MASQUERADE --random-fully"}, want: []string{"missing rule: to 10.0.0.0/8 return"}},
		"order":            {do: []string{"-D " + chain + " 5", "-I " + chain + " -j MASQUERADE --random-fully"}, want: []string{"rule out of order: masquerade random-fully"}},
		"another target":   {do: []string{"-R " + chain + " 5 -p tcp -j LOG --log-prefix x"}, want: []string{"unexpected rule: tcp rule with LOG, no verdict"}},
	} {
		t.Run(name, func(t *testing.T) {
			inEachVariant(t, func(n *node) {
				p := basic(chain) // five rules in each family
				p.Destinations = append(p.Destinations, entriesOf(policy.ActionExempt, "2001:db8::/32", "3fff::/20")...)
				want := desired(policy.OwnedBy(owner), p)
				for _, f := range policy.Families() {
					n.load(f, ":THIRD -", "-A POSTROUTING -p udp -j THIRD")
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
					assert.Contains(n, "difference", diff, ": "+w)
				}
				n.apply(want)
				n.holds(want)
				n.idle("a second Apply", func() { n.apply(want) })
				if name == "chain gone" || name == "jump onwards" {
					return // rules of other programs changed too
				}
				for _, f := range policy.Families() {
					assert.Equal(n, fmt.Sprintf("%s: not as before", f), sortedLines(n.save(f)), sortedLines(saved[f]))
				}
			})
		})
	}
}

// TestCheckWrite: it finds out why rules cannot be written, and changes nothing.
func TestCheckWrite(t *testing.T) {
	const chain = "IP-MASQ-AGENT"
	inEachVariant(t, func(n *node) {
		want, before := desired(policy.OwnedBy(owner), basic(chain)), n.generation()
		assert.NoError(n, n.CheckWrite(n.Context(), want, netfilter.Observation{}))
		bad := desired(policy.OwnedBy(owner), basic(chain))
		bad.Chains[0].Rules[0].Protocol = "none"
		if err := n.CheckWrite(n.Context(), bad, netfilter.Observation{}); err == nil {
			n.Error("rules that iptables-restore refuses can be written")
		}
		if got := n.observe(refs(want)); len(got.Chains) > 0 || n.generation() != before {
			n.Errorf("generation %d became %d, with chains %v", before, n.generation(), got.Chains)
		}
		if used, err := legacyInUse(policy.IPv4, Table); used || err != nil {
			n.Errorf("table nat of iptables-legacy is in use: %v, %v", used, err)
		}
		n.apply(want)
	})
}

// TestRemoveWithoutEffect: a chain can be removed although rules of POSTROUTING have no effect.
func TestRemoveWithoutEffect(t *testing.T) {
	inEachVariant(t, func(n *node) {
		want := desired(policy.OwnedBy(owner), basic("IP-MASQ-AGENT"))
		n.apply(want)
		for _, f := range policy.Families() {
			n.load(f, ":POSTROUTING DROP [0:0]")
		}
		assert.NoError(n, n.Remove(n.Context(), refs(want), nil))
		if got := n.observe(refs(want)); len(got.Chains) > 0 {
			n.Errorf("still there: %v", got.Chains)
		}
	})
}

func sortedLines(s string) []string {
	return slices.Sorted(strings.Lines(s))
}
