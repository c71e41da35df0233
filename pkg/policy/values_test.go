// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"math"
	"slices"
	"strings"
	"testing"
	"unicode"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestValidateChainName(t *testing.T) {
	const (
		runes   = "may hold only letters, digits, '_', '.' and '-'"
		first   = "must begin with a letter or a digit"
		builtIn = "is the name of a built-in chain or target; choose one of your own, such as IP-MASQ-AGENT"
		others  = ", a prefix of chains of other programs; choose another"
	)
	for _, tt := range []struct{ name, want string }{
		{"IP-MASQ-AGENT", ""},
		{"a", ""},
		{"7.of_9", ""},
		{strings.Repeat("x", 24), ""},
		{"RETURNED", ""},
		{"KUBE", ""},
		{"MY-CNI-CHAIN", ""},
		{"", "is empty; leave the key out for IP-MASQ-AGENT"},
		{strings.Repeat("x", 25), "has 25 characters; at most 24 are possible"},
		{"has space", runes},
		{"semi;colon", runes},
		{"new\nline", runes},
		{"straße", runes},
		{strings.Repeat("ß", 24), runes},
		{"ＲＥＴＵＲＮ", runes},
		{"\xff", runes},
		{"-j", first},
		{".x", first},
		{"_x", first},
		{"POSTROUTING", builtIn},
		{"postrouting", builtIn},
		{"RETURN", builtIn},
		{"Masquerade", builtIn},
		{"snat", builtIn},
		{"KUBE-POSTROUTING", "begins with KUBE-" + others},
		{"kube-x", "begins with KUBE-" + others},
		{"CNI-HOSTPORT-MASQ", "begins with CNI-" + others},
	} {
		wantError(t, tt.name, policy.ValidateChainName(tt.name), tt.want)
	}
}

func TestParsePorts(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want policy.Ports
	}{
		{"", policy.Ports{}},
		{"1-65535", policy.Ports{{1, 65535}}},
		{"7", policy.Ports{{7, 7}}},
		{"1024-29999,32768-65535", policy.Ports{{1024, 29999}, {32768, 65535}}},
		{"40000,1-2", policy.Ports{{40000, 40000}, {1, 2}}},
		{"1-2,3-4", policy.Ports{{1, 2}, {3, 4}}},
	} {
		got, err := policy.ParsePorts(tt.in)
		if err != nil {
			t.Errorf("ParsePorts(%q): %v", tt.in, err)
		}
		assert.Equal(t, tt.in, got, tt.want)
		assert.Equal(t, "written", got.String(), tt.in)
	}
	assert.Equal(t, "a range of one port", (policy.Ports{{7, 7}}).String(), "7")
	if p, err := policy.ParsePorts("7-7"); err != nil || p.String() != "7" {
		t.Errorf("ParsePorts(7-7) = %v, %v", p, err)
	}
}

func TestParsePortsSaysWhatToWrite(t *testing.T) {
	const bad = "is not a range of ports; write FIRST-LAST within 1-65535"
	for _, tt := range []struct{ in, want string }{
		{"1-2,2-3", "has overlapping ranges 1-2 and 2-3; write each port once"},
		{"10-20,5,12", "has overlapping ranges 10-20 and 12; write each port once"},
		{"5-9,1-20", "has overlapping ranges 1-20 and 5-9; write each port once"},
		{"7,7", "has overlapping ranges 7 and 7; write each port once"},
		{"20-10", "ends before it begins; did you mean 10-20?"},
		{"0", bad},
		{"0-10", bad},
		{"65536", bad},
		{"1-65536", bad},
		{"-", bad},
		{"1-", bad},
		{"-1", bad},
		{"+1", bad},
		{"1-2-3", bad},
		{"1:2", bad},
		{"0x10", bad},
		{"1_0", bad},
		{"01", bad},
		{"1, 2", `holds " 2", which ` + bad},
		{"1-2,", `holds "", which ` + bad},
		{",", `holds "", which ` + bad},
		{"1-2,20-10", `holds "20-10", which ends before it begins; did you mean 10-20?`},
		{strings.Repeat("x,", 64), "has 65 ranges, more than the 64 possible; write fewer that are wider"},
		{" ", bad},
		{"http", bad},
		{"1\n", bad},
	} {
		p, err := policy.ParsePorts(tt.in)
		wantError(t, tt.in, err, tt.want)
		if len(p) > 0 {
			t.Errorf("ParsePorts(%q) returned %v beside its error", tt.in, p)
		}
	}
}

// Each port of all ranges is as likely as every other: the shares that are
// written, each of what is left, make it so to within the kernel's resolution.
func TestEveryPortIsAsLikely(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cuts := rapid.SliceOfNDistinct(rapid.Uint16Range(1, 65535), 2, 12, rapid.ID).Draw(t, "cuts")
		slices.Sort(cuts)
		var all policy.Ports
		total := 0
		for i := 0; i+1 < len(cuts); i += 2 {
			r := policy.PortRange{First: cuts[i], Last: cuts[i+1]}
			all, total = append(all, r), total+r.Size()
		}
		all = rapid.Permutation(all).Draw(t, "ports")
		source := network("n", 1, policy.SourcePolicy{ToPorts: &all})
		rs := policy.Desired(policy.Merge([]policy.Source{source}), policy.Layout{Sets: true}, policy.Owner{})
		for _, proto := range policy.Protocols() {
			left, i := 1.0, 0
			for _, r := range rs.Chains[0].Rules {
				if r.Protocol != proto {
					continue
				}
				if r.Ports != all[i] {
					t.Fatalf("%s: range %d is %v, want %v", proto, i, r.Ports, all[i])
				}
				share := float64(r.Probability) / policy.ProbabilityScale
				if r.Probability == 0 {
					share = 1
				}
				want := float64(r.Ports.Size()) / float64(total)
				if got := left * share; math.Abs(got-want) > 1e-8 {
					t.Fatalf("%s: range %v of %v is taken with %.10f, want %.10f", proto, r.Ports, all, got, want)
				}
				left, i = left*(1-share), i+1
			}
			if i != len(all) || left != 0 {
				t.Fatalf("%s: %d of %d ranges are used, and %v of the traffic passes them", proto, i, len(all), left)
			}
		}
	})
}

// What is accepted reads back, is in bounds and names no port twice.
func FuzzParsePorts(f *testing.F) {
	for _, s := range []string{"", "1", "1-2,4-9", "65535", "1024-29999,32768-65535", "2-1", "1-2,2-3", "0", ",", "\x00", strings.Repeat("9", 400)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := policy.ParsePorts(s)
		if err != nil {
			checkMessage(t, err)
			return
		}
		var seen [65536]bool
		for _, r := range p {
			if r.First == 0 || r.First > r.Last {
				t.Fatalf("ParsePorts(%q) has %v", s, r)
			}
			for port := int(r.First); port <= int(r.Last); port++ {
				if seen[port] {
					t.Fatalf("ParsePorts(%q) has port %d twice", s, port)
				}
				seen[port] = true
			}
		}
		again, err := policy.ParsePorts(p.String())
		if err != nil {
			t.Fatalf("ParsePorts(%q) writes %q: %v", s, p, err)
		}
		assert.Equal(t, s, again, p)
	})
}

func TestParsePrefixSaysWhatToWrite(t *testing.T) {
	const notOne = "is not a CIDR; write address/length, such as 10.0.0.0/8 or fd00::/8"
	const empty = "is empty; write a CIDR such as 10.0.0.0/8, or drop the item"
	for _, tt := range []struct{ in, want string }{
		{"", empty},
		{" \t", empty},
		{"10.0.1.24/24", "has host bits set; did you mean 10.0.1.0/24?"},
		{"10.0.0.1/0", "has host bits set; did you mean 0.0.0.0/0?"},
		{"fd00::1/8", "has host bits set; did you mean fd00::/8?"},
		{"10.0.0.1", "is an address, not a CIDR; did you mean 10.0.0.1/32?"},
		{"fd00::1", "is an address, not a CIDR; did you mean fd00::1/128?"},
		{"::ffff:10.0.0.1", "is an address, not a CIDR; did you mean 10.0.0.1/32?"},
		{"::ffff:10.0.0.0/104", "is an IPv4 prefix written as IPv6; did you mean 10.0.0.0/8?"},
		{"::ffff:10.0.1.24/120", "is an IPv4 prefix written as IPv6; did you mean 10.0.1.0/24?"},
		{"::ffff:0:0/96", "is an IPv4 prefix written as IPv6; did you mean 0.0.0.0/0?"},
		{"::ffff:10.0.0.0/8", "mixes an IPv4 address with an IPv6 prefix length; write the IPv4 prefix itself"},
		{"::ffff:10.0.0.0/95", "mixes an IPv4 address with an IPv6 prefix length; write the IPv4 prefix itself"},
		{" 10.0.0.0/8", `has white space around it; write "10.0.0.0/8"`},
		{"10.0.0.0/8\n", `has white space around it; write "10.0.0.0/8"`},
		{"10.0.0.0/33", notOne},
		{"10.0.0.0/-1", notOne},
		{"10.0.0.0/08", notOne},
		{"010.0.0.0/8", notOne},
		{"10.0.0/8", notOne},
		{"10.0.0.0/255.0.0.0", notOne},
		{"10.0.0.0/", notOne},
		{"/8", notOne},
		{"fd00::/129", notOne},
		{"fe80::%eth0/10", notOne},
		{"fe80::1%eth0", notOne},
		{"10.0.0.0/8,172.16.0.0/12", notOne},
		{"internal", notOne},
	} {
		p, err := policy.ParsePrefix(tt.in)
		wantError(t, tt.in, err, tt.want)
		if p.IsValid() {
			t.Errorf("ParsePrefix(%q) returned %v beside its error", tt.in, p)
		}
	}
}

// What is accepted has one spelling and is of one family; what is refused is
// refused in one short line, and what that proposes is accepted.
func FuzzParsePrefix(f *testing.F) {
	for _, s := range []string{
		"", " ", "10.0.0.0/8", "10.0.1.24/24", "fd00::/8", "::ffff:10.0.0.0/104", "::ffff:1.2.3.4", "1.2.3.4",
		"fe80::1%e/64", "10.0.0.0/8\x00", strings.Repeat(" ", 300) + strings.Repeat("é", 300), "\xff/8",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := policy.ParsePrefix(s)
		if err != nil {
			checkMessage(t, err)
			if _, proposal, ok := strings.Cut(err.Error(), "did you mean "); ok {
				if _, err := policy.ParsePrefix(strings.TrimSuffix(proposal, "?")); err != nil {
					t.Errorf("%q: the proposal %q: %v", s, proposal, err)
				}
			}
			return
		}
		if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() {
			t.Errorf("ParsePrefix(%q) = %v", s, p)
		}
		if again, err := policy.ParsePrefix(p.String()); err != nil || again != p {
			t.Errorf("ParsePrefix(%q) = %v, which reads back as %v, %v", s, p, again, err)
		}
	})
}

// checkMessage holds an error to one printable line, of which what was given
// takes 256 bytes at most.
func checkMessage(t *testing.T, err error) {
	t.Helper()
	const ownWords = 120
	text := err.Error()
	if len(text) > 256+ownWords {
		t.Errorf("the message has %d bytes: %s", len(text), text)
	}
	if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		t.Errorf("the message has characters that cannot be printed: %q", text)
	}
}
