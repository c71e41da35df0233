// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"net/netip"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var _ netfilter.GuardTables = (*Driver)(nil)

// guardsOf returns the guards of a chain in both families, with every form of a rule.
func guardsOf(chain string, edit ...func(*policy.Guard)) []policy.Guard {
	owner := policy.OwnedBy("/var/lib/cni/ip-masq")
	guards := []policy.Guard{
		{Chain: chain, Family: policy.IPv4, Owner: owner, Mode: policy.GuardDrop, Scope: policy.Scope{Sources: ranges("10.88.0.0/16")},
			Exempt: ranges("10.0.0.0/8", "169.254.0.0/16"), Bound: ranges("10.0.0.0/8", "169.254.0.0/16"), BypassMark: 0x6000},
		{Chain: chain, Family: policy.IPv6, Owner: owner, Mode: policy.GuardDrop, Scope: policy.Scope{Sources: ranges("fd00:88::/64")},
			Exempt: ranges("fd00::/8", "fe80::/10"), Bound: ranges("fd00::/8", "fe80::/10"), BypassMark: 0x6000},
	}
	for i := range guards {
		for _, e := range edit {
			e(&guards[i])
		}
	}
	return guards
}

func ranges(list ...string) policy.Ranges { return policy.RangesOf(prefixes(list...)...) }

func (n *node) observeGuards() netfilter.GuardObservation {
	n.Helper()
	return assert.Must(n.driver.ObserveGuards(context.Background()))(n)
}

func (n *node) compareGuards(desired []policy.Guard) policy.Diff {
	n.Helper()
	return n.driver.CompareGuards(desired, n.observeGuards())
}

func (n *node) applyGuards(desired []policy.Guard) {
	n.Helper()
	assert.NoError(n, n.driver.ApplyGuards(context.Background(), desired, n.observeGuards()))
	if d := n.compareGuards(desired); len(d) > 0 {
		n.Fatalf("differs after apply:\n%s\n%s", d, n.listGuards())
	}
}

// listGuards writes the tables with guards, with the sets and chains in the order of their names.
func (n *node) listGuards(flags ...string) string {
	n.Helper()
	var all string
	for _, family := range []string{"ip", "ip6"} {
		out, err := exec.Command("nft", append(append([]string{"-s"}, flags...), "list", "table", family, netfilter.GuardTable)...).Output()
		if header, objects, found := strings.Cut(string(out), "\n"); err == nil && found {
			parts := strings.Split(strings.TrimSuffix(objects, "\n}\n"), "\n\n")
			slices.Sort(parts)
			all += header + "\n" + strings.Join(parts, "\n\n") + "\n}\n"
		}
	}
	return all
}

func drawGuards() *rapid.Generator[[]policy.Guard] {
	names := rapid.SampledFrom([]string{"IP-MASQ-AGENT", "10", "set", "a.b_c-D"})
	return rapid.Custom(func(t *rapid.T) (guards []policy.Guard) {
		for _, f := range policy.Families() {
			for _, chain := range rapid.SliceOfNDistinct(names, 0, 3, rapid.ID).Draw(t, "chains") {
				guards = append(guards, drawGuard(t, f, chain))
			}
		}
		return guards
	})
}

func drawGuard(t *rapid.T, f policy.Family, chain string) policy.Guard {
	modes := []policy.GuardMode{policy.GuardOff, policy.GuardCount, policy.GuardDrop}
	g := policy.Guard{
		Chain:  chain,
		Family: f,
		Owner:  policy.OwnedBy("/var/lib/cni/ip-masq"),
		Exempt: drawRanges(t, f, "exempt"),
		Scope:  policy.Merge([]policy.Source{{Policy: drawPolicy().Draw(t, "scope")}})[0].Scope(f),
		Mode:   rapid.SampledFrom(modes).Draw(t, "mode"),
	}
	g.Scope.Sources, g.Scope.Host = drawRanges(t, f, "pods"), false
	if g.Mode != policy.GuardOff && !rapid.Bool().Draw(t, "enforced") {
		return g
	}
	g.Bound = drawRanges(t, f, "bound")
	g.BypassMark = policy.Mark(rapid.Uint32Range(0, 0x6000).Draw(t, "mark"))
	for range rapid.IntRange(0, 3).Draw(t, "bindings") {
		b := policy.Binding{
			Sources:      drawRanges(t, f, "exempt pods"),
			Destinations: drawRanges(t, f, "their destinations"),
		}
		if rapid.Bool().Draw(t, "every destination") {
			b.Destinations = nil
		}
		if len(b.Sources) > 0 {
			g.MoreBindings = append(g.MoreBindings, b)
		}
	}
	return g
}

func drawRanges(t *rapid.T, f policy.Family, name string) policy.Ranges {
	var list []netip.Prefix
	for _, n := range rapid.SliceOfN(rapid.IntRange(0, 32), 0, 6).Draw(t, name) {
		a := netip.AddrFrom4([4]byte{10, byte(n * 8), 0, byte(n)})
		if f == policy.IPv6 {
			a = netip.AddrFrom16([16]byte{0xfd, byte(n * 8), 15: byte(n)})
		}
		list = append(list, netip.PrefixFrom(a, n).Masked())
	}
	return policy.RangesOf(list...)
}

// TestGuardsConverge: ApplyGuards reaches each set of guards from the one before and writes nothing the
// second time, nor after nft has loaded what RenderGuards writes.
func TestGuardsConverge(t *testing.T) {
	n := newNode(t)
	rapid.Check(t, func(t *rapid.T) {
		n.failer = t
		want := drawGuards().Draw(t, "guards")
		if n.applyGuards(want); len(want) == 0 != (n.listGuards() == "") {
			t.Fatalf("%d guards, and there is:\n%s", len(want), n.listGuards())
		}
		seen := n.observeGuards().Guards
		for i, g := range slices.SortedFunc(slices.Values(want), func(a, b policy.Guard) int {
			return strings.Compare(string(a.Family)+a.Chain, string(b.Family)+b.Chain)
		}) {
			if g.Mode == policy.GuardOff {
				g.Exempt = nil
			}
			s := seen[i]
			sameSets := s.Scope.Sources.Equal(g.Scope.Sources) && s.Exempt.Equal(g.Exempt) && s.Bound.Equal(g.Bound)
			for _, rest := range []*policy.Guard{&s, &g} {
				rest.Scope.Sources, rest.Exempt, rest.Bound = nil, nil, nil
			}
			if !sameSets || !cmp.Equal(s, g, cmpopts.EquateEmpty()) {
				t.Fatalf("%+v is observed as %+v", g, s)
			}
		}
		before, applied := n.generation(), n.listGuards()
		n.applyGuards(want)
		assert.Equal(t, "generation after a second ApplyGuards", n.generation(), before)
		n.nft(string(RenderGuards(want, policy.Families())))
		assert.Equal(t, "nft list table", n.listGuards(), applied)
		before = n.generation()
		n.applyGuards(want)
		assert.Equal(t, "generation after ApplyGuards of what was loaded", n.generation(), before)
	})
	n.failer = t
}

// TestCheckGuards: a question about a change of the tables has the error of the change, and changes nothing.
func TestCheckGuards(t *testing.T) {
	n := newNode(t)
	for _, before := range [][]policy.Guard{nil, guardsOf("X")} {
		n.applyGuards(before)
		unchanged := n.listGuards()
		less := guardsOf("X", func(g *policy.Guard) { g.Exempt = g.Exempt[1:] })
		refused := guardsOf("X", func(g *policy.Guard) { g.Scope.Interfaces = []string{strings.Repeat("x", 300) + "+"} })
		for range 2 {
			assert.NoError(t, n.driver.CheckGuards(t.Context(), less, n.observeGuards()))
			if err := n.driver.CheckGuards(t.Context(), refused, n.observeGuards()); err == nil {
				t.Error("the kernel would take it")
			}
		}
		assert.Equal(t, "guards", n.listGuards(), unchanged)
	}
}

// TestCheckGuardsAfterAnEmptyTable: a table without guards, which any program can make, does not tell that the
// kernel has what guards need.
func TestCheckGuardsAfterAnEmptyTable(t *testing.T) {
	n := newNode(t)
	n.nft("add table ip ip-masq-guard")
	n.observeGuards()
	n.nft("delete table ip ip-masq-guard")
	refused := guardsOf("X", func(g *policy.Guard) { g.Scope.Interfaces = []string{strings.Repeat("x", 300) + "+"} })
	err := n.driver.CheckGuards(t.Context(), refused, n.observeGuards())
	if err == nil {
		t.Error("the kernel was not asked")
	}
}

func TestGuardTamperingIsSeenAndRepaired(t *testing.T) {
	const table, chain, enforce = "ip ip-masq-guard", "ip ip-masq-guard guard-X", "ip ip-masq-guard enforce-X"
	last := `counter drop comment "` + policy.OwnedBy("/var/lib/cni/ip-masq").Comment() + `"`
	for name, tc := range map[string]struct{ script, diff string }{
		"jump deleted":               {"flush chain " + table + " guard", "ipv4 X: missing guard: chain guard: ip saddr @pods-X ip daddr != @exempt-X jump guard-X"},
		"jump of enforce deleted":    {"flush chain " + table + " enforce", "ipv4 X: missing guard: chain enforce: meta mark & 0x6000 == 0 ip saddr"},
		"jump twice":                 {"add rule " + table + " guard ip saddr @pods-X ip daddr != @exempt-X jump guard-X", "ipv4 X: unexpected guard: chain guard: rule of"},
		"rule in base chain":         {"insert rule " + table + " guard accept", "ipv4: unexpected guard: chain guard: rule of immediate"},
		"chain flushed":              {"flush chain " + chain, "ipv4 X: missing guard: chain guard-X: ct direction reply return"},
		"rule added":                 {"insert rule " + chain + " ip daddr 1.2.3.4 accept", "ipv4 X: unexpected guard: chain guard-X: rule of payload cmp immediate"},
		"counting alone":             {"flush chain " + chain + "; add rule " + chain + " ct direction reply return; add rule " + chain + " counter", "missing guard: chain guard-X: counter drop"},
		"order changed":              {"flush chain " + chain + "; add rule " + chain + " fib saddr type local return; add rule " + chain + " ct direction reply return; add rule " + chain + " fib daddr type local return; add rule " + chain + " fib daddr type broadcast return; add rule " + chain + " fib daddr type multicast return; add rule " + chain + " fib daddr type anycast return; add rule " + chain + " " + last, "ipv4 X: unexpected guard: chain guard-X: rules out of order"},
		"another owner":              {"flush chain " + enforce + "; add rule " + enforce + ` snat to ip saddr comment "` + policy.OwnedBy("/other").Comment() + `"`, "unexpected guard: chain enforce-X of /other"},
		"chain deleted":              {"flush chain " + table + " guard; delete chain " + chain, "ipv4 X: missing guard: chain guard-X\n"},
		"base chain deleted":         {"delete chain " + table + " enforce", "ipv4: missing guard: chain enforce\n"},
		"element added":              {"add element " + table + " exempt-X { 11.0.0.0/16 }", "ipv4 X: unexpected element: exempt 11.0.0.0/16"},
		"element deleted":            {"delete element " + table + " pods-X { 10.88.0.0/16 }", "ipv4 X: missing element: pods 10.88.0.0/16"},
		"set of another form":        {"flush chain " + table + " guard; delete set " + table + " exempt-X; add set " + table + " exempt-X { type ipv4_addr; flags interval, timeout; timeout 1h; }", `set "exempt-X" does not have the type`},
		"self without timeout":       {"flush chain " + enforce + "; delete set " + table + " self; add set " + table + " self { type ipv4_addr . ipv4_addr; flags dynamic; size 65535; }", `set "self" does not have the type`},
		"another chain":              {"add chain " + table + " mine; add rule " + table + " mine counter; insert rule " + chain + " jump mine", "ipv4: unexpected guard: chain mine"},
		"another empty chain":        {"add chain " + table + " mine", "ipv4: unexpected guard: chain mine"},
		"another set":                {"add set " + table + " mine { type ipv4_addr; flags interval; }", "ipv4: unexpected guard: set mine"},
		"a map with a jump":          {"add map " + table + " mine { type ipv4_addr : verdict; elements = { 1.2.3.4 : jump guard-X }; }", `set "mine" does not have the type`},
		"policy drop":                {"add chain " + table + " guard { policy drop; }", "chain guard is not the base chain"},
		"another priority":           {"delete chain " + table + " enforce; add chain " + table + " enforce { type nat hook postrouting priority 98; }; add rule " + table + " enforce accept", "chain enforce is not the base chain"},
		"another priority, empty":    {"delete chain " + table + " enforce; add chain " + table + " enforce { type nat hook postrouting priority 98; }", "chain enforce is not the base chain"},
		"no base chain":              {"delete chain " + table + " guard; add chain " + table + " guard", "chain guard is not the base chain"},
		"base chain of chain's name": {"flush chain " + table + " guard; delete chain " + chain + "; add chain " + chain + " { type filter hook output priority 0; }; add rule " + chain + " counter", "missing guard"},
		"table deleted":              {"delete table " + table, "ipv4 X: missing guard: table ip-masq-guard\n"},
		"table of IPv6 deleted":      {"delete table ip6 ip-masq-guard", "ipv6 X: missing guard: table ip-masq-guard\n"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			want := guardsOf("X")
			n.applyGuards(want)
			right := n.listGuards()
			n.nft(tc.script)
			assert.Contains(t, "difference", n.compareGuards(want).String()+"\n", tc.diff)
			n.applyGuards(want)
			assert.Equal(t, "repaired", n.listGuards(), right)
			n.nft(tc.script)
			n.applyGuards(nil)
			assert.Equal(t, "guards that were removed", n.listGuards(), "")
		})
	}
}

// TestGuardElementsAreNoDrift: what rules add to the set self, and counters, are no differences.
func TestGuardCountersAreNoDrift(t *testing.T) {
	n := newNode(t)
	want := guardsOf("X")
	n.applyGuards(want)
	n.nft(`add element ip ip-masq-guard self { 10.88.0.2 . 10.88.0.2 }
		flush chain ip ip-masq-guard guard-X
		add rule ip ip-masq-guard guard-X ct direction reply return
		add rule ip ip-masq-guard guard-X fib saddr type local return
		add rule ip ip-masq-guard guard-X fib daddr type local return
		add rule ip ip-masq-guard guard-X fib daddr type broadcast return
		add rule ip ip-masq-guard guard-X fib daddr type multicast return
		add rule ip ip-masq-guard guard-X fib daddr type anycast return
		add rule ip ip-masq-guard guard-X counter packets 7 bytes 700 drop`)
	if d := n.compareGuards(want); len(d) > 0 {
		t.Errorf("differs:\n%s", d)
	}
	assert.Equal(t, "packets", n.observeGuards().Packets, map[policy.ChainFamily]uint64{{Chain: "X", Family: policy.IPv4}: 7, {Chain: "X", Family: policy.IPv6}: 0})
}

// TestGuardsChangeInPlace: no table, set or unchanged chain is recreated.
func TestGuardsChangeInPlace(t *testing.T) {
	handles := regexp.MustCompile(`(table|set|chain) .*# handle \d+|(jump|return).*# handle \d+`)
	n := newNode(t)
	n.applyGuards(guardsOf("X"))
	before := strings.Join(handles.FindAllString(n.listGuards("-a"), -1), "\n")
	if !strings.Contains(before, "set pods-X { # handle ") {
		t.Fatalf("no handles:\n%s", before)
	}
	for _, edit := range []func(*policy.Guard){
		func(g *policy.Guard) {
			if g.Family == policy.IPv4 {
				g.Exempt, g.Bound, g.Scope.Sources = ranges("10.0.0.0/9", "0.0.0.0/8"), ranges(), ranges("10.88.0.0/17", "10.89.0.0/16")
			}
		},
		func(g *policy.Guard) { g.Exempt = policy.Ranges{} },
		func(*policy.Guard) {},
	} {
		n.applyGuards(guardsOf("X", edit))
		assert.Equal(t, "handles", strings.Join(handles.FindAllString(n.listGuards("-a"), -1), "\n"), before)
	}
	count := func(g *policy.Guard) { g.Mode = policy.GuardCount }
	for _, guards := range [][]policy.Guard{guardsOf("X", count), append(guardsOf("X"), guardsOf("Y")...), guardsOf("X")} {
		n.applyGuards(guards)
		handle := regexp.MustCompile(`(table|set (pods|exempt|bound)-X|set self) .*# handle \d+`)
		want := strings.Join(handle.FindAllString(before, -1), "\n")
		assert.Equal(t, "tables and sets of X", strings.Join(handle.FindAllString(n.listGuards("-a"), -1), "\n"), want)
	}
}

func TestGuardGolden(t *testing.T) {
	guards := append(guardsOf("X"), guardsOf("Y", func(g *policy.Guard) {
		g.Mode, g.Bound, g.Scope.Interfaces, g.Exempt = policy.GuardCount, nil, []string{"eth0", "wlan+"}, policy.Ranges{}
	})...)
	n := newNode(t)
	n.applyGuards(guards)
	for name, got := range map[string]string{
		"guard.nft":      string(RenderGuards(guards, policy.Families())),
		"guard.list.nft": n.listGuards(),
	} {
		file := filepath.Join("testdata", "render", name)
		golden.Check(t, file, got)
		n.nft("flush ruleset\n" + got)
		if d := n.compareGuards(guards); len(d) > 0 {
			t.Errorf("%s differs as it was loaded:\n%s", name, d)
		}
	}
	n.nft(string(RenderGuards(nil, []policy.Family{policy.IPv6})))
	if text := n.listGuards(); strings.Contains(text, "ip6") || !strings.Contains(text, "table ip ") {
		t.Errorf("the table of IPv6 is to go, and there is:\n%s", text)
	}
}

// TestFailedGuardsLeaveNothing: sets whose rules the kernel refuses would keep a table in the kernel, in which a
// reader takes the guards for what this kernel can have.
func TestFailedGuardsLeaveNothing(t *testing.T) {
	n := newNode(t)
	tooLong := func(g *policy.Guard) { g.Owner = policy.OwnedBy("/" + strings.Repeat("x", 300)) }
	err := n.driver.ApplyGuards(t.Context(), guardsOf("A", tooLong), n.observeGuards())
	assert.ErrorContains(t, err, "too long for a rule")
	assert.Equal(t, "tables", n.listGuards(), "")

	n.applyGuards(guardsOf("A"))
	before := n.listGuards()
	err = n.driver.ApplyGuards(t.Context(), guardsOf("B", tooLong), n.observeGuards())
	assert.ErrorContains(t, err, "too long for a rule")
	assert.Equal(t, "tables", n.listGuards(), before)
}
