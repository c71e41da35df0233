// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestTexts writes what each text is taken for, or what is wrong with it, into testdata/values.txt.
func TestTexts(t *testing.T) {
	var got strings.Builder
	texts(t, &got, "chain name", func(s string) (string, error) { return "", policy.ValidateChainName(s) },
		"IP-MASQ-AGENT", "a", "7.of_9", strings.Repeat("x", 24), "RETURNED", "KUBE", "MY-CNI-CHAIN", "", strings.Repeat("x", 25), "has space", "semi;colon", "new\nline",
		"straße", strings.Repeat("ß", 24), "ＲＥＴＵＲＮ", "\xff", "-j", ".x", "_x", "POSTROUTING", "postrouting", "RETURN", "Masquerade", "snat",
		"KUBE-POSTROUTING", "kube-x", "CNI-HOSTPORT-MASQ")
	texts(t, &got, "ports", policy.ParsePorts,
		"", "1-65535", "7", "7-7", "1024-29999,32768-65535", "40000,1-2", "1-2,3-4", "1-2,2-3", "10-20,5,12", "5-9,1-20", "7,7", "20-10", "0", "0-10", "65536", "1-65536",
		"-", "1-", "-1", "+1", "1-2-3", "1:2", "0x10", "1_0", "01", "1, 2", "1-2,", ",", "1-2,20-10", strings.Repeat("x,", 64), " ", "http", "1\n")
	texts(t, &got, "CIDR", policy.ParsePrefix,
		"", " \t", "10.0.1.24/24", "10.0.0.1/0", "fd00::1/8", "10.0.0.1", "fd00::1", "::ffff:10.0.0.1", "::ffff:10.0.0.0/104", "::ffff:10.0.1.24/120", "::ffff:0:0/96",
		"::ffff:10.0.0.0/8", "::ffff:10.0.0.0/95", " 10.0.0.0/8", "10.0.0.0/8\n", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/08", "010.0.0.0/8", "10.0.0/8",
		"10.0.0.0/255.0.0.0", "10.0.0.0/", "/8", "fd00::/129", "fe80::%eth0/10", "fe80::1%eth0", "10.0.0.0/8,172.16.0.0/12", "internal")
	texts(t, &got, "mark", policy.ParseMark,
		"0x6000", "0xFFFFFFFF", "0X6000", "24576", "0", "0x100000000", "-1", "", "0b11", "0x60_00", "0x6000/0x6000")
	texts(t, &got, "namespace", policy.ParseNamespace,
		"prod", "kube-system", "0", strings.Repeat("a", 63), strings.Repeat("a", 64), "", "Prod", "a.b", "-a", "a-", "a*", "ä")
	texts(t, &got, "pod", func(s string) (bool, error) { return policy.IsPodName(s), nil },
		"web-0", "a.b", strings.Repeat("a", 253), strings.Repeat("a", 254), "", "a..b", "A")
	texts(t, &got, "dataDir", func(s string) (string, error) { return policy.OwnedBy(s).Comment(), nil },
		"/var/lib/cni/ip-masq", "/a_b.c-d/E9", "/a+b@c", "/"+strings.Repeat("x", 199))
	// A newer version may say something else behind its number; that it is newer must still be seen.
	newer, keeps := fmt.Sprint("ip-masq/", policy.RulesSchema+1), " keeps its state in /state"
	texts(t, &got, "comment", func(s string) (policy.Owner, error) { return policy.ParseOwner(s), nil },
		"ip-masq/1"+keeps, "ip-masq/27"+keeps, "", "ip-masq/", "ip-masq/1", "ip-masq/0"+keeps, "ip-masq/-1"+keeps, "ip-masq/x"+keeps, "ip-masq/99999999999999999999"+keeps,
		"1"+keeps, " ip-masq/1"+keeps, "ip-masq-agent: local traffic is not subject to MASQUERADE", newer, newer+" lives elsewhere now", newer+keeps, "ip-masq/1 lives elsewhere now")
	texts(t, &got, "quoted", func(s string) (string, error) { return policy.Quote(s), nil },
		"", "podnet", "a b", "é", `"`, "a\nb\x1b[31m", "\u202e", "\xff", strings.Repeat("x", 254), strings.Repeat("x", 255), strings.Repeat("x", 1000), strings.Repeat("é", 300))
	texts(t, &got, "value of a key", func(s string) (string, error) {
		return "", errors.Join(&policy.FieldError{Key: "k", Index: -1, Value: s, Problem: "is odd"}, &policy.FieldError{Key: "k", Index: 2, Value: s, Problem: "is odd"})
	}, "", "0", "10.0.1.24/24", "two words", `a"b`, `a\b`, "a\n", strings.Repeat("x", 257), strings.Repeat("x", 256))
	texts(t, &got, "key", func(s string) (string, error) {
		return "", &policy.FieldError{Key: s, Index: -1, Problem: "is unknown"}
	},
		"masqLinklocal", "a\nb", strings.Repeat("k", 999))
	texts(t, &got, "origin", func(s string) (string, error) {
		o := policy.Origin{Source: policy.SourceID{Kind: policy.Network, Name: s}, Key: "masqChain", Index: 2}
		agents := policy.Origin{Source: policy.SourceID{Kind: policy.AgentFiles}, Key: "masqChain", Index: -1, File: s}
		return o.String() + "; " + agents.String(), nil
	}, "podnet", "a\nb")
	for _, key := range []string{"masqLinkLocal", ""} {
		fmt.Fprintln(&got, policy.Origin{Source: policy.SourceID{Kind: policy.BuiltIn}, Key: key, Index: -1})
	}
	golden.Check(t, "testdata/values.txt", got.String())
}

func texts[T any](t *testing.T, got *strings.Builder, what string, parse func(string) (T, error), list ...string) {
	t.Helper()
	for _, text := range list {
		value, err := parse(text)
		if err == nil {
			fmt.Fprintf(got, "%s %q = %+v.\n", what, text, value)
			continue
		}
		if fmt.Fprintf(got, "%s %q: %v\n", what, text, err); !reflect.ValueOf(&value).Elem().IsZero() {
			t.Errorf("%s %q returned %v beside its error", what, text, value)
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
