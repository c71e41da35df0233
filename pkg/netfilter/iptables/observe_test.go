// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestOddRules has rules of all kinds. None may be decoded as one that matches more
// than what iptables shows.
func TestOddRules(t *testing.T) {
	const recognized = 60
	inEachVariant(t, func(n *node) {
		for _, f := range policy.Families() {
			prefix := map[policy.Family]string{policy.IPv4: "10.0.0.0/8", policy.IPv6: "fd00::/8"}[f]
			odd := map[policy.Family]string{policy.IPv4: "10.0.0.0/255.0.255.0", policy.IPv6: "fd00::/ff00:ff::"}[f]
			rules := []string{
				"-d " + prefix + " -j RETURN", "! -d " + prefix + " -j RETURN", "! -s " + prefix + " -j RETURN",
				"-d " + odd + " -j RETURN", "-s " + odd + " -j RETURN",
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
				`-m comment --comment "ip-masq/7 keeps its state in /x" -j RETURN`, "-m limit --limit 5/min -j RETURN",
				"-m conntrack --ctstate NEW -j RETURN", "-m string --string -j --algo bm -j RETURN",
				"-j MASQUERADE", "-j MASQUERADE --random", "-j MASQUERADE --random-fully", "-p tcp -j MASQUERADE --to-ports 5",
				"-p tcp -j MASQUERADE --to-ports 5-9 --random", "-p sctp -j MASQUERADE --to-ports 5-9 --random-fully",
				"-j ACCEPT", "-j OTHER", "-g OTHER", "-j LOG", "-j MARK --set-mark 1", "-j NFLOG --nflog-group 3", "",
			}
			if f == policy.IPv4 {
				rules = append(rules, "-f -j RETURN", "! -f -j RETURN", "-j SNAT --to-source 1.2.3.4")
			}
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
		if got := n.agreesWithListing("X"); got != recognized {
			n.Errorf("%d rules and jumps are recognized, not %d", got, recognized)
		}
		got := n.observe(bothFamilies("X"))
		for _, c := range got.Chains {
			if c.Owner != (policy.Owner{Schema: 7, DataDir: "/x"}) {
				n.Errorf("owner %v", c.Owner)
			}
		}
		want := desired(policy.OwnedBy(owner), basic("X"))
		n.apply(want)
		n.holds(want)
		if err := n.Remove(n.Context(), bothFamilies("X"), nil); err != nil {
			n.Error(err)
		}
	})
}

// TestObserveEmpty reads where nothing is, and leaves it at that.
func TestObserveEmpty(t *testing.T) {
	inEachVariant(t, func(n *node) {
		n.idle("reading", func() {
			if got := n.observe(bothFamilies("IP-MASQ-AGENT")); len(got.Chains) > 0 {
				n.Errorf("got %+v", got)
			}
			if err := n.Remove(n.Context(), bothFamilies("IP-MASQ-AGENT"), nil); err != nil {
				n.Error(err)
			}
		})
		for _, f := range policy.Families() {
			if used, err := legacyInUse(f, natTable); err != nil || used {
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
		bare := New(Options{Path: "/nowhere"})
		opened, err := bare.Open(n.choice)
		if err != nil {
			n.Fatal(err)
		}
		got, err := opened.Observe(n.Context(), refs(want))
		if err != nil {
			n.Fatal(err)
		}
		d := policy.Compare(want, got.Rules)
		if len(d) != 1 || !strings.Contains(d.String(), "unexpected rule: return with l4proto 1") {
			n.Errorf("got %s", d)
		}
		err = opened.Apply(n.Context(), want, netfilter.Observation{}, nil)
		if err == nil || !strings.Contains(err.Error(), "find iptables-"+n.choice.Variant+" or iptables: not found; ") {
			n.Errorf("got %v", err)
		}
	})
}

// TestNativeExpressions has rules that nft wrote into the table of iptables.
// iptables shows some of them as rules that match more.
func TestNativeExpressions(t *testing.T) {
	n := newNode(t, "nft")
	want := desired(policy.OwnedBy(owner), basic("IP-MASQ-AGENT"))
	n.apply(want)
	for _, tc := range []struct{ rule, want string }{
		{"insert rule ip nat IP-MASQ-AGENT ip daddr @s return",
			"-A IP-MASQ-AGENT -j RETURN (and what iptables does not show: return with destination set \"s\")"},
		{"insert rule ip nat IP-MASQ-AGENT ip daddr 10.0.0.0/8 ip ttl 64 return", "-A IP-MASQ-AGENT -d 10.0.0.0/8 -m ttl --ttl-eq 64 -j RETURN"},
		{"insert rule ip nat IP-MASQ-AGENT ip daddr 10.0.0.0-10.0.0.7 return",
			"-A IP-MASQ-AGENT -d 10.0.0.7/32 -j RETURN (and what iptables does not show: return with destination 10.0.0.0-255.255.255.255, destination 0.0.0.0-10.0.0.7)"},
		{"insert rule ip nat POSTROUTING ip saddr @s jump IP-MASQ-AGENT",
			"-A POSTROUTING -j IP-MASQ-AGENT (and what iptables does not show: jump IP-MASQ-AGENT with source set \"s\")"},
	} {
		shell(t, "nft 'add set ip nat s { type ipv4_addr; }'", "nft '"+tc.rule+"'")
		d := policy.Compare(want, n.observe(refs(want)))
		if len(d) != 1 || !d[0].Unexpected || d[0].Text != tc.want {
			t.Errorf("%s: %s", tc.rule, d)
		}
		n.apply(want)
		n.holds(want)
	}
	// Old versions of iptables keep the comment beside the rule.
	shell(t, `nft add rule ip nat IP-MASQ-AGENT counter return comment '"ip-masq/9 keeps its state in /old"'`)
	got := n.observe(refs(want))
	if o := got.Find(policy.IPv4, "IP-MASQ-AGENT").Owner; o != (policy.Owner{Schema: 9, DataDir: "/old"}) {
		t.Errorf("owner %v", o)
	}
	n.apply(want)
	// What is the same in its native form is the same.
	shell(t, "nft insert rule ip nat POSTROUTING fib daddr type != local jump IP-MASQ-AGENT")
	if d := policy.Compare(want, n.observe(refs(want))); d.String() != "ipv4 IP-MASQ-AGENT: unexpected jump from POSTROUTING: to non-local" {
		t.Errorf("got %s", d)
	}
}

// TestBrokenSocket breaks the connection to nf_tables before each use of it.
func TestBrokenSocket(t *testing.T) {
	n := newNode(t, netfilter.VariantNFT)
	want := desired(policy.OwnedBy(owner), basic("X"))
	n.apply(want)
	n.load(policy.IPv4, "-A POSTROUTING -j X")
	cut := func() {
		n.Helper()
		n.generation() // connects
		if err := n.nft.conn.Close(); err != nil {
			n.Fatal(err)
		}
	}
	cut()
	d := policy.Compare(want, n.observe(refs(want)))
	if len(d) != 1 || d.String() != "ipv4 X: unexpected jump from POSTROUTING: of all traffic" {
		n.Errorf("got %s", d)
	}
	cut()
	n.apply(want)
	n.holds(want)
	cut()
	if got, err := n.driver.FindChain(n.Context(), "X"); err != nil || len(got) != 1 {
		n.Errorf("got %v, %v", got, err)
	}
	cut()
	if err := n.Remove(n.Context(), refs(want), nil); err != nil {
		n.Error(err)
	}
	for _, f := range policy.Families() {
		if got := n.save(f); strings.Contains(got, "X") {
			n.Errorf("%s: not removed:\n%s", f, got)
		}
	}
}

func BenchmarkObserve(b *testing.B) {
	for _, variant := range variants() {
		for _, prefixes := range []int{64, 10_000} {
			b.Run(fmt.Sprintf("%s/%d", variant, prefixes), func(b *testing.B) {
				runtime.LockOSThread()
				if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
					b.Fatal(err)
				}
				opened, err := New(Options{}).Open(netfilter.Choice{Backend: policy.IPTables, Variant: variant})
				if err != nil {
					b.Fatal(err)
				}
				p := basic("X")
				p.EnableIPv6.Value = false
				for i := range prefixes {
					prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(i >> 8), byte(i)}), 24)
					p.Destinations = append(p.Destinations, policy.Entry{Prefix: prefix, Action: policy.Exempt})
				}
				want := desired(policy.OwnedBy(owner), p)
				if err := opened.Apply(b.Context(), want, netfilter.Observation{}, nil); err != nil {
					b.Fatal(err)
				}
				b.ReportAllocs()
				for b.Loop() {
					rs, err := opened.Observe(b.Context(), refs(want))
					if err != nil || len(rs.Rules.Chains) != 1 {
						b.Fatal(err)
					}
				}
			})
		}
	}
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
