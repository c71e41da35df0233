// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// failer is what testing and rapid have in common.
type failer interface {
	assert.T
	Error(args ...any)
	Fatal(args ...any)
}

// node is the kernel of the sandbox, empty at first.
type node struct {
	failer
	driver  *Driver
	backend netfilter.Backend
}

func newNode(t *testing.T) *node {
	n := &node{failer: t, driver: New()}
	n.nft("flush ruleset")
	var err error
	if n.backend, err = n.driver.Open(netfilter.Choice{Backend: policy.NFTables}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		n.nft("flush ruleset")
		assert.NoError(t, n.driver.Close())
	})
	return n
}

func (n *node) nft(script string) {
	n.Helper()
	sandbox.Feed(n, script, "nft", "-f", "-")
}

// list writes the tables, always in the same order. The number at the end of a
// set that replaced another is left out.
func (n *node) list() string {
	n.Helper()
	var all string
	for _, table := range []string{"ip ip-masq", "ip6 ip-masq", "ip other"} {
		out, err := exec.Command("nft", append([]string{"-s", "list", "table"}, strings.Fields(table)...)...).Output()
		if err == nil {
			all += string(out)
		}
	}
	return strings.ReplaceAll(strings.ReplaceAll(all, "AGENT.2", "AGENT"), "B.2", "B")
}

func (n *node) apply(desired policy.Ruleset) {
	n.Helper()
	assert.NoError(n, n.backend.Apply(context.Background(), desired, netfilter.Observation{}, nil))
	if d := n.compare(desired); len(d) > 0 {
		n.Fatalf("differs after apply:\n%s\n%s", d, n.list())
	}
}

func (n *node) observe() netfilter.Observation {
	n.Helper()
	return assert.Must(n.backend.Observe(context.Background(), nil))(n)
}

func (n *node) compare(desired policy.Ruleset) policy.Diff {
	n.Helper()
	observed := assert.Must(n.backend.Observe(context.Background(), nil))(n)
	return policy.Compare(desired, observed.Rules)
}

// rewrite replaces each pair of successive expressions of the chain by what edit returns, as a version of
// nft would write it, unless that is nil.
func (n *node) rewrite(family nfnetlink.Family, table, chain string, edit func(first, second nfnetlink.Expr) []nfnetlink.Expr) {
	n.Helper()
	var conn nfnetlink.Conn
	rules := assert.Must(conn.Rules(family, table, chain))(n)
	var b nfnetlink.Batch
	b.FlushChain(family, table, chain)
	edited := false
	for _, r := range rules {
		for i := 1; i < len(r.Exprs); i++ {
			if to := edit(r.Exprs[i-1], r.Exprs[i]); to != nil {
				r.Exprs, edited = slices.Replace(r.Exprs, i-1, i+1, to...), true
				break
			}
		}
		b.AddRule(family, table, chain, r.Exprs, r.Comment)
	}
	if err := errors.Join(conn.Commit(&b), conn.Close()); err != nil || !edited {
		n.Fatalf("edited: %v, %v", edited, err)
	}
}

func (n *node) generation() uint32 {
	n.Helper()
	return assert.Must(n.driver.conn.Generation())(n)
}

func sourcePolicy(chain string, edit ...func(*policy.SourcePolicy)) policy.SourcePolicy {
	s := policy.SourcePolicy{Chain: chain, EnableIPv6: new(true), NonMasqueradeCIDRs: prefixes("10.0.0.0/8", "fd00::/8")}
	for _, e := range edit {
		e(&s)
	}
	return s
}

var prefixes = policytest.Prefixes

func desired(policies ...policy.SourcePolicy) policy.Ruleset {
	var all []policy.Source
	for i, s := range policies {
		all = append(all, policy.Source{ID: policy.SourceID{Kind: policy.Network, Name: fmt.Sprint(i)}, Policy: s})
	}
	return policy.Desired(policytest.ChooseOutputs(policy.Merge(all)), policy.Layout{Sets: true}, policy.OwnedBy("/var/lib/cni/ip-masq"))
}

// TestApplyConverges: Apply reaches each set of policies from the one before, and writes nothing the second
// time. CheckWrite accepts each, and changes nothing.
func TestApplyConverges(t *testing.T) {
	n := newNode(t)
	rapid.Check(t, func(t *rapid.T) {
		n.failer = t
		want := desired(rapid.SliceOfN(drawPolicy(), 0, 3).Draw(t, "policies")...)
		before := n.generation()
		for _, from := range []netfilter.Observation{n.observe(), {}} {
			if err := n.backend.CheckWrite(context.Background(), want, from); err != nil || n.generation() != before {
				t.Fatalf("%v; the generation is %d, it was %d", err, n.generation(), before)
			}
		}
		n.apply(want)
		before = n.generation()
		n.apply(want)
		assert.Equal(t, "generation after a second Apply", n.generation(), before)
	})
	n.failer = t
}

func drawPolicy() *rapid.Generator[policy.SourcePolicy] {
	from := policytest.Any()
	from.Chain = rapid.SampledFrom([]string{"IP-MASQ-AGENT", "10", "set", "a.b_c-D"})
	from.Interface = rapid.SampledFrom([]string{"eth0", "br+", "abcdefghijklmno"})
	from.Prefix = func(f policy.Family) *rapid.Generator[netip.Prefix] {
		return rapid.Custom(func(t *rapid.T) netip.Prefix {
			if f == policy.IPv6 {
				a := [16]byte{0: 0xfd, 15: rapid.Byte().Draw(t, "last")}
				return netip.PrefixFrom(netip.AddrFrom16(a), rapid.SampledFrom([]int{0, 7, 8, 9, 120, 124, 127, 128}).Draw(t, "bits")).Masked()
			}
			a := [4]byte{rapid.SampledFrom([]byte{0, 10, 255}).Draw(t, "first"), 0, 0, rapid.Byte().Draw(t, "last")}
			return netip.PrefixFrom(netip.AddrFrom4(a), rapid.SampledFrom([]int{0, 1, 8, 9, 24, 28, 31, 32}).Draw(t, "bits")).Masked()
		})
	}
	return rapid.Custom(from.SourcePolicy)
}

func TestTamperingIsSeenAndRepaired(t *testing.T) {
	const table, chain = "ip ip-masq", "ip ip-masq masq-IP-MASQ-AGENT"
	for name, tc := range map[string]struct{ script, diff string }{
		"jump twice":         {"add rule " + table + " postrouting fib daddr type != local jump masq-IP-MASQ-AGENT", "unexpected jump"},
		"rule added":         {"insert rule " + chain + " ip daddr 1.2.3.4 accept", "unexpected rule: rule with destination 1.2.3.4/32, accept"},
		"rule in base chain": {"insert rule " + table + " postrouting accept", "unrecognized: chain postrouting"},
		"element added":      {"add element " + table + " exempt-IP-MASQ-AGENT { 11.0.0.0/16 }", "unexpected element: destination 11.0.0.0/16"},
		"set flushed":        {"flush set " + table + " exempt-IP-MASQ-AGENT", "missing element"},
		"another chain":      {"add chain " + table + " mine; add rule " + table + " mine counter; insert rule " + chain + " jump mine", `unrecognized: chain "mine"`},
		"another set":        {"add set " + table + " mine { type ipv4_addr; }", `unrecognized: set "mine"`},
		"anonymous set":      {"insert rule " + chain + " ip daddr { 1.2.3.4, 5.6.7.8 } masquerade", "unexpected rule"},
		"a counter object":   {"add counter " + table + " mine", "neither a chain nor a set"},
		"a map":              {"add map " + table + " mine { type ipv4_addr : verdict; elements = { 1.2.3.4 : accept }; }", `unrecognized: set "mine"`},
		"a verdict map":      {"add map " + table + " mine { type ipv4_addr : verdict; elements = { 10.9.9.9 : accept }; }; insert rule " + chain + " ip daddr vmap @mine", "unexpected rule"},
		"a set that is filled": {"add set " + table + " mine { type ipv4_addr; size 100; flags dynamic, timeout; timeout 1h; }; " +
			"insert rule " + chain + " add @mine { ip daddr }", "unexpected rule"},
		"a base chain of the chain's name": {"flush chain " + table + " postrouting; delete chain " + chain + "; add chain " + chain +
			" { type nat hook output priority 0; }; add rule " + chain + " counter return", "missing jump"},
		"an unused set of the name that comes next": {"add set " + table + " exempt-IP-MASQ-AGENT.2 { type ipv4_addr; flags interval; }", `unrecognized: set "exempt-IP-MASQ-AGENT.2" of ip-masq, which no rule uses`},
		"dormant":             {"add table " + table + " { flags dormant; }", "table has flags"},
		"policy drop":         {"add chain " + table + " postrouting { policy drop; }", "not the base chain"},
		"verdict changed":     {"flush chain " + chain + "; add rule " + chain + " ip daddr @exempt-IP-MASQ-AGENT accept; add rule " + chain + " masquerade fully-random", "missing rule"},
		"order changed":       {"flush chain " + chain + "; add rule " + chain + " masquerade fully-random; add rule " + chain + " ip daddr @exempt-IP-MASQ-AGENT return", "out of order"},
		"other family's rule": {"insert rule ip6 ip-masq postrouting accept", "ipv6: unrecognized"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			want := desired(sourcePolicy("IP-MASQ-AGENT"))
			n.apply(want)
			right := n.list()
			n.nft(tc.script)
			assert.Contains(t, "difference", n.compare(want).String(), tc.diff)
			n.apply(want)
			assert.Equal(t, "repaired", n.list(), right)
		})
	}
}

// TestSetAttributes replaces an owned set by one that matches the same addresses now. An attribute that
// may change that later, or hinders a change, is drift; a comment is not.
func TestSetAttributes(t *testing.T) {
	const elements, flags = "elements = { 10.0.0.0/8, 169.254.0.0/16, 224.0.0.0/4, 255.255.255.255 };", "flags interval;"
	for name, tc := range map[string]struct {
		set   string
		drift bool
	}{
		"the same":                 {flags + elements, false},
		"comment":                  {flags + "comment \"mine\";" + elements, false},
		"element comment":          {flags + "elements = { 10.0.0.0/8 comment \"mine\", 169.254.0.0/16, 224.0.0.0/4, 255.255.255.255 };", false},
		"timeout":                  {"flags interval, timeout; timeout 60s;" + elements, true},
		"element timeout":          {"flags interval, timeout; elements = { 10.0.0.0/8 timeout 60s, 169.254.0.0/16 };", true},
		"gc interval":              {"flags interval, timeout; gc-interval 7s;" + elements, true},
		"size":                     {flags + "size 100;" + elements, true},
		"policy":                   {flags + "policy memory;" + elements, true},
		"constant":                 {"flags interval, constant;" + elements, true},
		"no interval":              {"elements = { 10.0.0.1, 169.254.0.1 };", true},
		"counter for each element": {flags + "counter;" + elements, true},
		"counter of one element":   {flags + "counter; elements = { 10.0.0.0/8 counter packets 1 bytes 1, 169.254.0.0/16 };", true},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			want := desired(sourcePolicy("IP-MASQ-AGENT"))
			n.apply(want)
			right := n.list()
			n.nft(`add set ip ip-masq exempt-IP-MASQ-AGENT.2 { type ipv4_addr; ` + tc.set + ` }
				flush chain ip ip-masq masq-IP-MASQ-AGENT
				add rule ip ip-masq masq-IP-MASQ-AGENT ip daddr @exempt-IP-MASQ-AGENT.2 counter return
				add rule ip ip-masq masq-IP-MASQ-AGENT counter masquerade fully-random comment "` + policy.OwnedBy("/var/lib/cni/ip-masq").Comment() + `"
				delete set ip ip-masq exempt-IP-MASQ-AGENT`)
			if d := n.compare(want).String(); strings.Contains(d, "unrecognized: set") != tc.drift || (d != "") != tc.drift {
				t.Errorf("the difference does not tell the set:\n%s", d)
			}
			n.apply(want)
			if !tc.drift {
				return
			}
			assert.Equal(t, "repaired", n.list(), right)
		})
	}
}

// chainA writes chain masq-A with the handles of its rules.
func (n *node) chainA(family string) string {
	n.Helper()
	return assert.Output(n, exec.Command("nft", "-a", "list", "chain", family, "ip-masq", "masq-A"))
}

func TestOnlyWhatDiffersIsWritten(t *testing.T) {
	n := newNode(t)
	n.apply(desired(sourcePolicy("A"), sourcePolicy("B")))
	n.nft("insert rule ip ip-masq masq-B ip daddr { 1.2.3.4, 5.6.7.8 } counter packets 7 bytes 7 return; add rule ip ip-masq masq-B counter packets 9 bytes 9")
	before := n.chainA("ip")
	n.apply(desired(sourcePolicy("A"), sourcePolicy("B", func(s *policy.SourcePolicy) { s.MasqueradeCIDRs = prefixes("10.1.0.0/16") })))
	assert.Equal(t, "chain A was rewritten", n.chainA("ip"), before)
}

func TestOneSetChangesInPlace(t *testing.T) {
	n := newNode(t)
	n.apply(desired(sourcePolicy("A")))
	before := n.chainA("ip")
	for _, list := range [][]string{{"10.0.0.0/9", "11.0.0.0/8"}, {"10.0.0.0/8", "11.0.0.0/8"}, {"0.0.0.0/1"}, {"128.0.0.0/1", "10.0.0.0/8"}} {
		n.apply(desired(sourcePolicy("A", func(s *policy.SourcePolicy) { s.NonMasqueradeCIDRs = prefixes(append(list, "fd00::/8")...) })))
	}
	assert.Equal(t, "rules were rewritten", n.chainA("ip"), before)
	sources := func(exempt, source string) policy.Ruleset {
		return desired(sourcePolicy("A", func(s *policy.SourcePolicy) {
			s.NonMasqueradeCIDRs, s.NonMasqueradeSourceCIDRs = prefixes(exempt), prefixes(source)
		}))
	}
	n.apply(sources("10.0.0.0/8", "10.1.0.0/16"))
	before = n.chainA("ip")
	if n.apply(sources("11.0.0.0/8", "11.1.0.0/16")); n.chainA("ip") == before {
		t.Error("two sets were changed in place: packets met one of them before the other")
	}
}

// manyPrefixes returns 10,000 prefixes.
func manyPrefixes() (list []netip.Prefix) {
	for i := range 10_000 {
		list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(20 + i>>14), byte(i >> 6), byte(i << 2), 0}), 24))
	}
	return list
}

func TestRemove(t *testing.T) {
	n := newNode(t)
	n.nft("add table ip other; add chain ip other c; add rule ip other c counter")
	others := n.list()
	n.apply(desired(sourcePolicy("B")))
	justB := n.list()
	n.apply(desired(sourcePolicy("A"), sourcePolicy("B")))
	refs := func(name string) []policy.ChainFamily {
		return []policy.ChainFamily{{Chain: name, Family: policy.IPv4}, {Chain: name, Family: policy.IPv6}}
	}
	for _, step := range []struct{ chain, want string }{{"A", justB}, {"A", justB}, {"B", others}, {"B", others}} {
		assert.NoError(t, n.backend.Remove(context.Background(), refs(step.chain), nil))
		assert.Equal(t, fmt.Sprintf("after removing %s", step.chain), n.list(), step.want)
	}
}

// cutOff writes a ruleset as far as the first batch: new sets, and no rule yet.
func (n *node) cutOff(desired policy.Ruleset) {
	n.Helper()
	now := assert.Must(n.driver.read(tableName))(n)
	w := writer{change: toDesired(desired)}
	w.encode(now)
	assert.NoError(n, n.driver.conn.Commit(w.fill))
}

// TestCutOff: what a writer leaves that ends between its two batches goes with the
// next write, and with the next removal of any chain or none.
func TestCutOff(t *testing.T) {
	ports := policy.Ports{{First: 7, Last: 7}}
	a, b := sourcePolicy("A"), sourcePolicy("B", func(s *policy.SourcePolicy) { s.ToPorts = &ports })
	other := func(s *policy.SourcePolicy) {
		s.NonMasqueradeCIDRs = prefixes("11.0.0.0/8", "fc00::/8")
		s.SourceCIDRs = s.NonMasqueradeCIDRs
	}
	none := func(n *node) error { return n.backend.Remove(context.Background(), nil, nil) }
	for name, tc := range map[string]struct {
		before, cut []policy.SourcePolicy
		then        func(*node) error
		want        []policy.SourcePolicy
	}{
		"the first write, then a removal": {nil, []policy.SourcePolicy{a, b}, none, nil},
		"the first write, then a removal of the chain": {nil, []policy.SourcePolicy{a}, func(n *node) error {
			return n.backend.Remove(context.Background(), []policy.ChainFamily{{Chain: "A", Family: policy.IPv4}}, nil)
		}, nil},
		"the first write, then none is wanted": {nil, []policy.SourcePolicy{a}, func(n *node) error {
			return n.backend.Apply(context.Background(), policy.Ruleset{}, netfilter.Observation{}, nil)
		}, nil},
		"the first write, then another": {nil, []policy.SourcePolicy{a}, func(n *node) error {
			return n.backend.Apply(context.Background(), desired(b), netfilter.Observation{}, nil)
		}, []policy.SourcePolicy{b}},
		"a change, then a removal": {[]policy.SourcePolicy{a, b}, []policy.SourcePolicy{sourcePolicy("A", other), b}, none, []policy.SourcePolicy{a, b}},
		"a change, then a removal of another chain": {[]policy.SourcePolicy{a, b}, []policy.SourcePolicy{sourcePolicy("A", other), b}, func(n *node) error {
			var refs []policy.ChainFamily
			for _, f := range policy.Families() {
				refs = append(refs, policy.ChainFamily{Chain: "B", Family: f})
			}
			return n.backend.Remove(context.Background(), refs, nil)
		}, []policy.SourcePolicy{a}},
		"a change, then a write": {[]policy.SourcePolicy{a, b}, []policy.SourcePolicy{sourcePolicy("A", other), b}, func(n *node) error {
			return n.backend.Apply(context.Background(), desired(a, b), netfilter.Observation{}, nil)
		}, []policy.SourcePolicy{a, b}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.apply(desired(tc.want...))
			want := n.list()
			n.nft("flush ruleset")
			n.apply(desired(tc.before...))
			before := n.list()
			n.cutOff(desired(tc.cut...))
			if n.list() == before {
				t.Fatal("nothing was left")
			}
			assert.NoError(t, tc.then(n))
			assert.Equal(t, "rules", n.list(), want)
		})
	}
}

// TestRefusedWhole: where the second batch cannot be applied, nothing of the first
// stays, however often it is tried. A question has the same answer.
func TestRefusedWhole(t *testing.T) {
	ports := policy.Ports{{First: 7, Last: 7}}
	bad := desired(sourcePolicy("A", func(s *policy.SourcePolicy) {
		s.ToPorts = &ports
		s.NonMasqueradeCIDRs = prefixes("11.0.0.0/8", "fc00::/8")
	}))
	for i := range bad.Chains { // a name that the kernel does not take
		for j := range bad.Chains[i].Jumps {
			bad.Chains[i].Jumps[j].Out = strings.Repeat("x", 300) + "+"
		}
	}
	for name, before := range map[string]policy.Ruleset{"nothing": {}, "another policy": desired(sourcePolicy("A"))} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.apply(before)
			want := n.list()
			for range 3 {
				if err := n.backend.CheckWrite(context.Background(), bad, n.observe()); err == nil {
					t.Error("the kernel would take it")
				}
				if err := n.backend.Apply(context.Background(), bad, netfilter.Observation{}, nil); err == nil {
					t.Fatal("the kernel took it:", n.list())
				}
			}
			assert.Equal(t, "rules", n.list(), want)
		})
	}
}

// TestRefusedFamily: of two tables only the one that the kernel refuses to change is recreated.
func TestRefusedFamily(t *testing.T) {
	n := newNode(t)
	n.apply(desired(sourcePolicy("A"), sourcePolicy("B")))
	n.nft("add map ip ip-masq mine { type ipv4_addr : verdict; elements = { 1.2.3.4 : jump masq-B }; }")
	v4, v6 := n.chainA("ip"), n.chainA("ip6")
	n.apply(desired(sourcePolicy("A")))
	if n.chainA("ip") == v4 {
		t.Error("table ip was not recreated: the kernel refused nothing")
	}
	assert.Equal(t, "chain of table ip6", n.chainA("ip6"), v6)
}

// TestCheckOfChangedRules: a question is about the rules that were observed.
func TestCheckOfChangedRules(t *testing.T) {
	n := newNode(t)
	before, after := desired(sourcePolicy("A")), desired(sourcePolicy("B"))
	n.apply(before)
	observed, guards := n.observe(), n.observeGuards()
	n.nft("add table ip another")
	assert.NoError(t, n.backend.CheckWrite(t.Context(), after, observed))
	n.nft("flush chain ip ip-masq masq-A; add table ip ip-masq-guard; add chain ip ip-masq-guard another")
	if err := n.backend.CheckWrite(t.Context(), after, observed); !errors.Is(err, netfilter.ErrChanged) {
		t.Error(err)
	}
	if err := n.driver.CheckGuards(t.Context(), guardsOf("A"), guards); !errors.Is(err, netfilter.ErrChanged) {
		t.Error(err)
	}
}

// TestGenerationOfLoadedModule: the kernel module begins to count again when it is loaded again.
func TestGenerationOfLoadedModule(t *testing.T) {
	n := newNode(t)
	loads := t.TempDir()
	n.driver.module = filepath.Join(loads, "nf_tables")
	seen := map[netfilter.Generation]bool{}
	for _, load := range []string{"first", "second"} {
		assert.NoError(t, os.Mkdir(filepath.Join(loads, load), 0o700))
	}
	for _, load := range []string{"", "first", "second"} {
		if load != "" {
			_ = os.Remove(n.driver.module)
			assert.NoError(t, os.Rename(filepath.Join(loads, load), n.driver.module))
		}
		g := assert.Must(n.driver.Generation())(t)
		if seen[g] {
			t.Errorf("load %q has the generation of another one: %s", load, g)
		}
		seen[g] = true
	}
}

// TestLongBatches: the second batch does not fit into a socket as it is opened. In a
// user namespace there is no other, and then nothing is written.
func TestLongBatches(t *testing.T) {
	var ports policy.Ports
	for p := uint16(1024); len(ports) < 8_000; p += 2 {
		ports = append(ports, policy.PortRange{First: p, Last: p})
	}
	n := newNode(t)
	want := desired(sourcePolicy("A", func(s *policy.SourcePolicy) { s.ToPorts = &ports }))
	if err := n.backend.Apply(context.Background(), want, netfilter.Observation{}, nil); err != nil {
		if !strings.Contains(err.Error(), "net.core.wmem_max") || n.list() != "" {
			t.Fatalf("%v\n%s", err, n.list())
		}
		return
	}
	if d := n.compare(want); len(d) > 0 {
		t.Errorf("differs: %d changes", len(d))
	}
}

func TestUsesAndProbe(t *testing.T) {
	n := newNode(t)
	uses := func() []netfilter.Choice {
		t.Helper()
		return assert.Must(n.driver.FindChain(context.Background(), "A"))(t)
	}
	if got := uses(); len(got) != 0 {
		t.Errorf("uses %v of nothing", got)
	}
	n.apply(desired(sourcePolicy("A")))
	choice := assert.Must(n.driver.Probe(context.Background(), ""))(t)
	assert.Equal(t, "uses", uses(), []netfilter.Choice{choice})
}
