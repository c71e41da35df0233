// SPDX-License-Identifier: Apache-2.0

// Package policytest has what the tests of the parsers of policy share: a generator of policies and
// checks of messages.
package policytest

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Generators are what SourcePolicy draws values from.
type Generators struct {
	Chain, Interface *rapid.Generator[string]
	Prefix           func(policy.Family) *rapid.Generator[netip.Prefix]
	Ports            *rapid.Generator[policy.Ports]
}

// Any has generators of all values.
func Any() Generators {
	isName := func(s string) bool { return policy.ValidateChainName(s) == nil }
	return Generators{
		Chain:     rapid.StringMatching(`[a-z][A-Za-z0-9_.\-]{0,23}`).Filter(isName),
		Interface: rapid.StringMatching(`[a-z<>&'][a-z0-9@.<>&'-]{0,13}\+?`),
		Prefix:    prefix,
		Ports:     rapid.Custom(ports),
	}
}

// SourcePolicy draws a policy that is valid by itself, with every key of the table or without.
func (g Generators) SourcePolicy(t *rapid.T) policy.SourcePolicy {
	var s policy.SourcePolicy
	item := rapid.Custom(func(t *rapid.T) netip.Prefix {
		f := policy.IPv4
		if s.EnableIPv6 != nil && *s.EnableIPv6 {
			f = rapid.SampledFrom(policy.Families()).Draw(t, "family")
		}
		return g.Prefix(f).Draw(t, "prefix")
	})
	s.EnableIPv6 = rapid.SampledFrom([]*bool{nil, new(false), new(true), new(true)}).Draw(t, "enableIPv6")
	for _, k := range policy.Keys(&s) {
		switch to := k.Field.(type) {
		case **bool:
			if k.Name != "enableIPv6" {
				*to = rapid.Ptr(rapid.Bool(), true).Draw(t, k.Name)
			}
		case *[]netip.Prefix:
			drawList(t, k.Name, item, to)
		case *policy.AddressItems:
			drawList(t, k.Name, item, (*[]netip.Prefix)(to))
		case *[]string:
			drawList(t, k.Name, g.Interface, to)
		case *policy.Namespaces:
			drawList(t, k.Name, rapid.SampledFrom([]string{"kube-system", "prod", "unused"}), (*[]string)(to))
		case *string:
			*to = g.Chain.Draw(t, k.Name)
		case policy.Word:
			if word := rapid.SampledFrom(append([]string{""}, to.Choices()...)).Draw(t, k.Name); word != "" {
				assert.NoError(t, to.Set(word))
			}
		case **policy.Mark:
			*to = rapid.Ptr(rapid.Map(rapid.Uint32(), func(n uint32) policy.Mark { return policy.Mark(n) }), true).Draw(t, k.Name)
		case **policy.Ports:
			*to = rapid.Ptr(g.Ports, true).Draw(t, k.Name)
		default:
			t.Fatalf("%s has a type that is not drawn", k.Name)
		}
	}
	s.MasqueradeCIDRs = slices.DeleteFunc(s.MasqueradeCIDRs, func(p netip.Prefix) bool { return slices.Contains(s.NonMasqueradeCIDRs, p) })
	return s
}

// drawList draws a list that is not stated, empty, or of different items.
func drawList[T comparable](t *rapid.T, key string, item *rapid.Generator[T], to *[]T) {
	if rapid.Bool().Draw(t, key+" stated") {
		*to = append([]T{}, rapid.SliceOfNDistinct(item, 0, 9, rapid.ID).Draw(t, key)...)
	}
}

func prefix(f policy.Family) *rapid.Generator[netip.Prefix] {
	size := f.All().Addr().BitLen() / 8
	return rapid.Custom(func(t *rapid.T) netip.Prefix {
		a, _ := netip.AddrFromSlice(rapid.SliceOfN(rapid.Byte(), size, size).Draw(t, "address"))
		return netip.PrefixFrom(a, rapid.IntRange(0, 8*size).Draw(t, "bits")).Masked()
	}).Filter(func(p netip.Prefix) bool { return !p.Addr().Is4In6() })
}

func ports(t *rapid.T) policy.Ports {
	ends := rapid.SliceOfNDistinct(rapid.Uint16Range(1, 65535), 0, 12, rapid.ID).Draw(t, "ends")
	slices.Sort(ends)
	all := policy.Ports{}
	for pair := range slices.Chunk(ends, 2) {
		all = append(all, policy.PortRange{First: pair[0], Last: pair[len(pair)-1]})
	}
	return all
}

// ChooseOutputs chooses the addresses of a node that has the first address of each item: the last one on lo, the
// others on an interface each.
func ChooseOutputs(policies []policy.Policy) []policy.Policy {
	for i := range policies {
		p := &policies[i]
		var node []policy.NodeAddress
		for j, item := range p.OutputAddresses.Value {
			last := j == len(p.OutputAddresses.Value)-1
			node = append(node, policy.NodeAddress{Address: item.Addr(), Interface: fmt.Sprint("eth", j), Shared: last, Up: true})
		}
		for _, f := range policy.Families() {
			p.Outputs = append(p.Outputs, p.OutputAddressesOf(f, node, nil)...)
		}
	}
	return policies
}

// Keys is the table of keys, for what does not depend on a policy.
func Keys() []policy.Key { return policy.Keys(new(policy.SourcePolicy)) }

// Samples returns two values of a key as JSON, TOML and YAML have them. They are valid beside those of the
// other keys.
func Samples(t testing.TB, k policy.Key) []string {
	t.Helper()
	switch to := k.Field.(type) {
	case **bool:
		return []string{"true", "false"}
	case *policy.AddressItems:
		return []string{`["192.0.2.0/24","198.51.100.7/32"]`, "[]"}
	case *[]netip.Prefix:
		return []string{fmt.Sprintf(`["10.%d.0.0/16"]`, len(k.Name)), "[]"} // no two names are as long
	case *[]string:
		return []string{`["eth0","wg+"]`, "[]"}
	case *policy.Namespaces:
		return []string{`["kube-system","prod"]`, "[]"}
	case *string:
		return []string{`"RED"`, `"BLUE"`}
	case policy.Word:
		last := to.Choices()[len(to.Choices())-2:]
		return []string{policy.Quote(last[1]), policy.Quote(last[0])}
	case **policy.Mark:
		return []string{`"0x4000"`, `"0"`}
	case **policy.Ports:
		return []string{`"1024-2047,7"`, `""`}
	}
	t.Fatalf("%s has a type without samples", k.Name)
	return nil
}

// Stating returns the policy for chain C that a document with more keys states.
func Stating(t testing.TB, keys string) policy.SourcePolicy {
	t.Helper()
	s := policy.SourcePolicy{Chain: "C"}
	d := json.NewDecoder(strings.NewReader("{" + keys + "}"))
	d.DisallowUnknownFields()
	assert.NoError(t, d.Decode(&s))
	return s
}

// Every returns a sample of every key, in lines of a document: KEY, how the form separates it from its value,
// and the value.
func Every(t testing.TB, quote, separator string) []string {
	t.Helper()
	var lines []string
	for _, k := range Keys() {
		lines = append(lines, quote+k.Name+quote+separator+Samples(t, k)[0])
	}
	return lines
}

// CheckMessage checks that a message is one line of printable text, of bounded length.
func CheckMessage(t testing.TB, err error) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	text := err.Error()
	if len(text) > 8<<10 {
		t.Errorf("message has %d bytes", len(text))
	}
	if !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		t.Errorf("message is not one line of printable text: %q", text)
	}
}

// WantError compares a message in which FILE stands for the path.
func WantError(t testing.TB, err error, path, want string) {
	t.Helper()
	CheckMessage(t, err)
	if got := strings.ReplaceAll(err.Error(), path, "FILE"); got != want {
		t.Errorf("message\n%s\nwant\n%s", got, want)
	}
}

// Prefixes parses CIDRs. The list is not nil, as one that a document states.
func Prefixes(cidrs ...string) []netip.Prefix {
	all := []netip.Prefix{}
	for _, c := range cidrs {
		all = append(all, netip.MustParsePrefix(c))
	}
	return all
}

// Ports parses ranges of ports.
func Ports(t testing.TB, s string) *policy.Ports {
	t.Helper()
	p := assert.Must(policy.ParsePorts(s))(t)
	return &p
}
