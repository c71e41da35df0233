// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

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
		wantEqual(t, tt.in, got, tt.want)
		if got.String() != tt.in {
			t.Errorf("ParsePorts(%q) writes itself as %q", tt.in, got)
		}
	}
	if got := (policy.Ports{{7, 7}}).String(); got != "7" {
		t.Errorf("a range of one port is %q, want 7", got)
	}
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

func TestPortRange(t *testing.T) {
	for _, tt := range []struct {
		r    policy.PortRange
		size int
		zero bool
	}{{policy.PortRange{}, 1, true}, {policy.PortRange{1, 65535}, 65535, false}, {policy.PortRange{7, 7}, 1, false}} {
		if tt.r.IsZero() != tt.zero || !tt.zero && tt.r.Size() != tt.size {
			t.Errorf("%v: size %d, zero %v", tt.r, tt.r.Size(), tt.r.IsZero())
		}
	}
}

func TestPortsInJSON(t *testing.T) {
	var p policy.Ports
	if err := json.Unmarshal([]byte(`"5-9,1"`), &p); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(p)
	if err != nil || string(text) != `"5-9,1"` {
		t.Errorf("%v reads as %s, %v", p, text, err)
	}
	wantError(t, "UnmarshalText", p.UnmarshalText([]byte("9-5")), `"9-5" ends before it begins; did you mean 5-9?`)
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
		wantEqual(t, s, again, p)
	})
}
