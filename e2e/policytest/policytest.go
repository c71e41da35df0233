// SPDX-License-Identifier: Apache-2.0

// Package policytest has what the tests of the parsers of policy share: a generator of policies and
// checks of messages.
package policytest

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// SourcePolicy draws a policy that is valid by itself. It draws every key, and fails the test for one
// of a new type.
func SourcePolicy(t *rapid.T) policy.SourcePolicy {
	var s policy.SourcePolicy
	s.EnableIPv6 = rapid.Ptr(rapid.Bool(), true).Draw(t, "enableIPv6")
	v := reflect.ValueOf(&s).Elem()
	for i := range v.NumField() {
		key := v.Type().Field(i).Name
		switch to := v.Field(i).Addr().Interface().(type) {
		case **bool:
			if key != "EnableIPv6" {
				*to = rapid.Ptr(rapid.Bool(), true).Draw(t, key)
			}
		case *[]netip.Prefix:
			drawList(t, key, prefix(s.EnableIPv6 != nil && *s.EnableIPv6), to)
		case *[]string:
			drawList(t, key, rapid.StringMatching(`[a-z<>&'][a-z0-9@.<>&'-]{0,13}\+?`), to)
		case *string:
			isName := func(s string) bool { return policy.ValidateChainName(s) == nil }
			*to = rapid.StringMatching(`[a-z][A-Za-z0-9_.\-]{0,23}`).Filter(isName).Draw(t, key)
		case *policy.Backend:
			*to = rapid.SampledFrom([]policy.Backend{"", policy.Auto, policy.IPTables, policy.NFTables}).Draw(t, key)
		case *policy.GuardMode:
			*to = rapid.SampledFrom([]policy.GuardMode{"", policy.GuardOff, policy.GuardCount, policy.GuardDrop}).Draw(t, key)
		case *policy.StaleConnections:
			*to = rapid.SampledFrom([]policy.StaleConnections{"", policy.KeepConnections, policy.ResetConnections}).Draw(t, key)
		case **policy.Mark:
			*to = rapid.Ptr(rapid.Map(rapid.Uint32(), func(n uint32) policy.Mark { return policy.Mark(n) }), true).Draw(t, key)
		case **policy.Ports:
			*to = rapid.Ptr(rapid.Custom(ports), true).Draw(t, key)
		default:
			t.Fatalf("%s has a type that is not drawn", key)
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

func prefix(allowIPv6 bool) *rapid.Generator[netip.Prefix] {
	return rapid.Custom(func(t *rapid.T) netip.Prefix {
		size := 4
		if allowIPv6 && rapid.Bool().Draw(t, "ipv6") {
			size = 16
		}
		bytes := rapid.SliceOfN(rapid.Byte(), size, size).Draw(t, "address")
		a, _ := netip.AddrFromSlice(bytes)
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
	p, err := policy.ParsePorts(s)
	if err != nil {
		t.Fatal(err)
	}
	return &p
}
