// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func to(s string) policy.Ranges { return policy.RangesOf(netip.MustParsePrefix(s)) }

// compareRules has cmp look at all that a rule holds; Rule.Equal does not.
func compareRules() cmp.Options {
	return cmp.Options{
		cmp.Comparer(func(a, b policy.Rule) bool { return reflect.DeepEqual(a, b) }),
		cmpopts.EquateEmpty(),
	}
}

func TestParseRule(t *testing.T) {
	const alien = policy.Unrecognized
	for _, tc := range []struct {
		line   string
		want   policy.Rule // an Alien's text is the line
		target string
	}{
		{line: `-A X -j RETURN`, want: policy.Rule{Verdict: policy.Return}},
		{line: `-A X -d 10.0.0.0/8 -j RETURN`, want: policy.Rule{To: to("10.0.0.0/8"), Verdict: policy.Return}},
		{line: `-A X -s 10.0.0.1/32 -j RETURN`, want: policy.Rule{From: to("10.0.0.1/32"), Verdict: policy.Return}},
		{line: `-A X -s 10.0.0.1 -j RETURN`, want: policy.Rule{From: to("10.0.0.1/32"), Verdict: policy.Return}},
		{line: `-A X -d 0.0.0.0/0 -j RETURN`, want: policy.Rule{Verdict: policy.Return}},
		{line: `-A X -d fd00::/8 -j RETURN`, want: policy.Rule{To: to("fd00::/8"), Verdict: policy.Return}},
		{line: `-A X -d 10.0.0.0/8 -m comment --comment "ip-masq-agent: local traffic is not subject to MASQUERADE" -j RETURN`,
			want: policy.Rule{To: to("10.0.0.0/8"), Verdict: policy.Return}},
		{line: `-A X -m comment --comment "quoted \" and \\ and \' -j ACCEPT" -j MASQUERADE --random-fully`,
			want: policy.Rule{Verdict: policy.Masquerade, RandomFully: true}},
		{line: `-A X -m comment --comment "" -j RETURN`, want: policy.Rule{Verdict: policy.Return}},
		{line: `-A X -m comment --comment "two` + "\n" + `lines" -j RETURN`, want: policy.Rule{Verdict: policy.Return}},
		{line: `-A X -p tcp -m statistic --mode random --probability 0.50000000000 -j MASQUERADE --to-ports 1024-2000`,
			want: policy.Rule{Protocol: "tcp", Share: 1 << 30, Verdict: policy.Masquerade, Ports: policy.PortRange{First: 1024, Last: 2000}}},
		{line: `-A X -p udp -j MASQUERADE --to-ports 7 --random-fully`,
			want: policy.Rule{Protocol: "udp", Verdict: policy.Masquerade, Ports: policy.PortRange{First: 7, Last: 7}, RandomFully: true}},
		{line: `-A X -p 132 -j MASQUERADE`, want: policy.Rule{Protocol: "sctp", Verdict: policy.Masquerade}},
		{line: `-A POSTROUTING -m addrtype ! --dst-type LOCAL -j X`, want: policy.Rule{NotToLocal: true, Verdict: policy.Jump}, target: "X"},
		{line: `-A POSTROUTING -s 10.0.0.0/8 -o eth+ -m addrtype ! --src-type LOCAL ! --dst-type LOCAL -j X`,
			want:   policy.Rule{From: to("10.0.0.0/8"), Out: "eth+", NotFromLocal: true, NotToLocal: true, Verdict: policy.Jump},
			target: "X"},
		{line: `-A POSTROUTING -m addrtype ! --src-type LOCAL -m addrtype ! --dst-type LOCAL -j X`,
			want: policy.Rule{NotFromLocal: true, NotToLocal: true, Verdict: policy.Jump}, target: "X"},

		{line: `-A X ! -d 10.0.0.0/8 -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -d 10.0.0.0/255.0.255.0 -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -d 10.0.0.1/8 -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X ! -o eth0 -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -i eth0 -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -f -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -p icmp -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X ! -p tcp -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -p tcp -m tcp --dport 80 -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -m mark --mark 0x1 -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -m addrtype --dst-type LOCAL -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -m addrtype ! --dst-type LOCAL --limit-iface-out -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -m addrtype ! --dst-type LOCAL,BROADCAST -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -m statistic --mode nth --every 3 --packet 0 -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -m statistic --mode random ! --probability 0.25000000000 -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -m statistic --mode random --probability 0.00000000000 -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -m statistic --mode random --probability NaN -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -m statistic -j RETURN`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -j ACCEPT`, want: policy.Rule{Verdict: policy.Jump}, target: "ACCEPT"},
		{line: `-A X -j SNAT --to-source 1.2.3.4`, want: policy.Rule{Verdict: alien}, target: "SNAT"},
		{line: `-A X -j MASQUERADE --random`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -p tcp -j MASQUERADE --to-ports 0`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -p tcp -j MASQUERADE --to-ports 9-8`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -p tcp -j RETURN --to-ports 8-9`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -j RETURN --random-fully`, want: policy.Rule{Verdict: alien}},
		{line: `-A X`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -d`, want: policy.Rule{Verdict: alien}},
		{line: `-A X -j RETURN !`, want: policy.Rule{Verdict: alien}},
		{line: `-A POSTROUTING -g X`, want: policy.Rule{Verdict: alien}, target: "X"},
		{line: `-A POSTROUTING -f -j X`, want: policy.Rule{Verdict: alien}, target: "X"},
		{line: `-A POSTROUTING -m mark ! --mark 0x1 -j X`, want: policy.Rule{Verdict: alien}, target: "X"},
		{line: `-A POSTROUTING -m comment --comment "-j" -j X`, want: policy.Rule{Verdict: policy.Jump}, target: "X"},
	} {
		if tc.want.Verdict == alien {
			tc.want.Text = tc.line
		}
		chain := strings.Fields(tc.line)[1]
		listed, err := parseListing(append([]string{"# Warning: something", "-N " + chain}, strings.Split(tc.line, "\n")...))
		if err != nil || len(listed[chain]) != 1 {
			t.Errorf("%s: %v, %v", tc.line, listed, err)
			continue
		}
		got := listed[chain][0]
		if diff := cmp.Diff(tc.want, got.rule, compareRules()); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", tc.line, diff)
		}
		if got.target != tc.target || got.text != tc.line {
			t.Errorf("%s: leads to %q, shown as %q", tc.line, got.target, got.text)
		}
	}
}

func TestParseListing(t *testing.T) {
	lines := []string{
		"-P POSTROUTING ACCEPT -c 12 720",
		"-N X",
		"-N EMPTY",
		"-A POSTROUTING -m addrtype ! --dst-type LOCAL -c 5 300 -j X",
		`-A X -d 10.0.0.0/8 -j RETURN -c 7 420`,
		`-A X -m comment --comment "ip-masq/1 keeps its state in /var/lib/cni/ip-masq" -c 3 180 -j MASQUERADE --random-fully`,
		`-A X -m comment --comment "x`,
		`-A POSTROUTING -j X" -c 1 60 -j ACCEPT`,
	}
	got, err := parseListing(lines)
	if err != nil {
		t.Fatal(err)
	}
	want := []policy.Chain{{
		Family: policy.IPv4, Name: "X",
		Jumps: []policy.Rule{{NotToLocal: true, Verdict: policy.Jump, Connections: 5}},
		Rules: []policy.Rule{
			{To: to("10.0.0.0/8"), Verdict: policy.Return, Connections: 7},
			{Verdict: policy.Masquerade, RandomFully: true, Connections: 3},
			{Verdict: policy.Unrecognized, Text: "-A X -m comment --comment \"x\n-A POSTROUTING -j X\" -j ACCEPT", Connections: 1},
		},
		Owner: policy.OwnedBy("/var/lib/cni/ip-masq"),
	}, {Family: policy.IPv4, Name: "EMPTY"}}
	if diff := cmp.Diff(want, table{entries: got}.chains(policy.IPv4, []string{"X", "EMPTY", "MISSING"}), compareRules()); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if _, err := parseListing([]string{`-A X -m comment --comment "open -j RETURN`}); err == nil {
		t.Error("a quotation that does not end was read")
	}
}

// FuzzParseListing looks for text that is read as a rule which iptables would
// print otherwise: what we write for it has to be read as the same.
func FuzzParseListing(f *testing.F) {
	f.Add("-A X -d 10.0.0.0/8 -m comment --comment \"a b\" -j RETURN")
	f.Add("-A X -s fd00::/8 -o eth+ -p tcp -m statistic --mode random --probability 0.33333333349 -j MASQUERADE --to-ports 1-2 --random-fully")
	f.Add("-A POSTROUTING -m addrtype ! --src-type LOCAL ! --dst-type LOCAL -c 1 2 -j X")
	f.Add("-A X ! -d 1.2.3.4/32 -g Y")
	f.Fuzz(func(t *testing.T, text string) {
		listed, err := parseListing(strings.Split(text, "\n"))
		if err != nil {
			return
		}
		for chain, entries := range listed {
			for _, e := range entries {
				if e.rule.Verdict == policy.Unrecognized || !wordOnly(chain) || e.target != "" && !wordOnly(e.target) {
					continue
				}
				written := spellOut(e.rule, chain, e.target, "")
				again, err := parseListing(written)
				if err != nil || len(again[chain]) != 1 {
					t.Fatalf("%q was written as %q, which reads as %v, %v", e.text, written, again, err)
				}
				if !again[chain][0].rule.Equal(e.rule) || again[chain][0].target != e.target {
					t.Fatalf("%q reads as %v, written as %q reads as %v", e.text, e.rule, written, again[chain][0].rule)
				}
			}
		}
	})
}

func wordOnly(s string) bool { return quote(s) == s }
