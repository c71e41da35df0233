// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// rich has every form that a rule of an owned table can have.
func rich(t failer) policy.Ruleset {
	t.Helper()
	ports := assert.Must(policy.ParsePorts("1024-29999,7,32768-65535"))(t)
	return desired(
		sourcePolicy("IP-MASQ-AGENT", func(s *policy.SourcePolicy) {
			s.NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "128.0.0.0/1", "fd00::/8", "8000::/1")
			s.MasqueradeCIDRs = prefixes("10.1.0.0/16", "203.0.113.9/32", "fd00:1::/32")
		}),
		sourcePolicy("10", func(s *policy.SourcePolicy) {
			s.NonMasqueradeCIDRs, s.MasqLinkLocal = prefixes(), new(true)
			s.SourceCIDRs = prefixes("10.244.0.0/16", "10.246.0.0/17", "fd01::/64")
			s.NonMasqueradeSourceCIDRs = prefixes("10.244.7.0/24", "fd01::7/128")
			s.OutputInterfaces = []string{"eth+", "wlan0", "a-b@c'd", "$x;{}#,", "abcdefghijklmn+"}
			s.MasqueradeHost, s.RandomFully = new(false), new(false)
		}),
		sourcePolicy("set", func(s *policy.SourcePolicy) { s.ToPorts = &ports }),
		sourcePolicy("only-v4", func(s *policy.SourcePolicy) { s.EnableIPv6, s.NonMasqueradeCIDRs = new(false), prefixes("0.0.0.0/0") }),
		sourcePolicy("elsewhere", func(s *policy.SourcePolicy) { s.SourceCIDRs = prefixes("fd02::/64") }), // no jump in IPv4
	)
}

func TestRenderGolden(t *testing.T) {
	for name, rs := range map[string]policy.Ruleset{
		"rich":  rich(t),
		"plain": desired(sourcePolicy("IP-MASQ-AGENT", func(s *policy.SourcePolicy) { s.EnableIPv6, s.NonMasqueradeCIDRs = nil, nil })),
		"none":  {},
		"odd": {Chains: []policy.Chain{{Family: policy.IPv4, Name: "ODD", Rules: []policy.Rule{
			{From: policy.Ranges{}, Verdict: policy.Return}, // no source at all
			{Verdict: policy.Unrecognized, Text: "strange\nrule"},
		}}}},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join("testdata", "render", name+".nft")
			golden.Check(t, file, newNode(t).load(rs))
		})
	}
}

// load gives the rendered text to nft, as a person would, and returns it.
func (n *node) load(rs policy.Ruleset, families ...policy.Family) string {
	n.Helper()
	if len(families) == 0 {
		families = policy.Families()
	}
	text := Render(rs, families)
	n.nft(string(text))
	return string(text)
}

// ruleset is everything there is, as nft lists it. The order of tables is that
// in which they were made.
func (n *node) ruleset() string {
	n.Helper()
	var all strings.Builder
	for _, family := range []string{"ip", "ip6"} {
		all.WriteString(assert.Output(n, exec.Command("nft", "list", "ruleset", family)))
	}
	return counted.ReplaceAllString(all.String(), "counter")
}

var counted = regexp.MustCompile(`counter packets \d+ bytes \d+`)

// isAsApplied: what was loaded is read as desired, owner and all, is not written again
// by Apply, and looks to nft like what Apply makes.
func (n *node) isAsApplied(want policy.Ruleset) {
	n.Helper()
	if d := n.compare(want); len(d) > 0 {
		n.Fatalf("differs as it was loaded:\n%s\n%s", d, n.ruleset())
	}
	observed := assert.Must(n.backend.Observe(context.Background(), nil))(n)
	for _, c := range observed.Rules.Chains {
		if owner := want.Find(c.Family, c.Name).Owner; c.Owner != owner {
			n.Fatalf("%s %s is owned by %+v, want %+v", c.Family, c.Name, c.Owner, owner)
		}
	}
	loaded, before := n.ruleset(), n.generation()
	n.apply(want)
	assert.Equal(n, "generation after Apply of what was loaded", n.generation(), before)
	n.nft("flush ruleset")
	n.apply(want)
	assert.Equal(n, "nft list ruleset", loaded, n.ruleset())
}

func TestRenderLoadsAsApplied(t *testing.T) {
	n := newNode(t)
	want := rich(t)
	n.load(want)
	n.load(want) // a second time is as the first
	n.isAsApplied(want)
}

// TestRenderOneFamily: the table of another family is not touched.
func TestRenderOneFamily(t *testing.T) {
	n := newNode(t)
	want := desired(sourcePolicy("A"))
	n.load(want, policy.IPv6)
	if got := n.ruleset(); !strings.Contains(got, "table ip6 ip-masq") || strings.Contains(got, "table ip ip-masq") {
		t.Errorf("IPv6 alone was loaded, and there is\n%s", got)
	}
	n.load(policy.Ruleset{}, policy.IPv4)
	n.load(want, policy.IPv4)
	n.isAsApplied(want)
	n.load(policy.Ruleset{})
	assert.Equal(t, "ruleset of nothing desired", n.ruleset(), "")
}

// TestOnePort: a single port is no range, which nft before 1.0 refuses ("Range has
// zero or negative size"). Two registers with the same port, as earlier versions wrote
// them, are no difference.
func TestOnePort(t *testing.T) {
	n := newNode(t)
	ports := policy.Ports{{First: 7, Last: 7}}
	want := desired(sourcePolicy("A", func(s *policy.SourcePolicy) { s.ToPorts = &ports }))
	if text := n.load(want); !strings.Contains(text, " to :7 ") || strings.Contains(text, ":7-7") {
		t.Errorf("rendered as:\n%s", text)
	}
	n.isAsApplied(want)
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		n.rewrite(family, tableName, chainPrefix+"A", func(first, second nfnetlink.Expr) []nfnetlink.Expr {
			port, ofPort := first.(nfnetlink.Immediate)
			masq, isMasq := second.(nfnetlink.Masq)
			if !ofPort || !isMasq {
				return nil
			}
			masq.ProtoMax = nfnetlink.Reg2
			return []nfnetlink.Expr{port, nfnetlink.Immediate{Dreg: masq.ProtoMax, Data: port.Data}, masq}
		})
	}
	if d := n.compare(want); len(d) > 0 {
		t.Errorf("two registers differ:\n%s", d)
	}
}

var _ netfilter.Driver = (*Driver)(nil)
