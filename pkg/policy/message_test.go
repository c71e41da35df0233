// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestQuote(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"", `""`},
		{"podnet", `"podnet"`},
		{"a b", `"a b"`},
		{"é", `"é"`},
		{`"`, `"\""`},
		{"a\nb\x1b[31m", `"a\nb\x1b[31m"`},
		{"\u202e", `"\u202e"`},
		{"\xff", `"\xff"`},
		{strings.Repeat("x", 254), `"` + strings.Repeat("x", 254) + `"`},
		{strings.Repeat("x", 255), `"` + strings.Repeat("x", 251) + `…"`},
		{strings.Repeat("x", 1000), `"` + strings.Repeat("x", 251) + `…"`},
		{strings.Repeat("é", 300), `"` + strings.Repeat("é", 125) + `…"`},
	} {
		assert.Equal(t, fmt.Sprintf("Quote(%q)", tt.in), policy.Quote(tt.in), tt.want)
	}
}

// Whatever it is given, a quotation is one line of at most 256 bytes in which
// nothing can pass for what surrounds it.
func TestQuoteIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.OneOf(rapid.StringN(0, 400, 600), rapid.Custom(func(t *rapid.T) string {
			return string(rapid.SliceOfN(rapid.Byte(), 0, 400).Draw(t, "bytes"))
		})).Draw(t, "s")
		q := policy.Quote(s)
		if len(q) > 256 || !utf8.ValidString(q) || strings.ContainsFunc(q, func(r rune) bool { return !strconv.IsPrint(r) }) {
			t.Fatalf("Quote(%q) has %d bytes: %s", s, len(q), q)
		}
		if !strings.HasPrefix(q, `"`) || !strings.HasSuffix(q, `"`) {
			t.Fatalf("Quote(%q) = %s", s, q)
		}
		if back, err := strconv.Unquote(q); err == nil && back != s && !strings.HasSuffix(q, `…"`) {
			t.Fatalf("Quote(%q) reads back as %q", s, back)
		}
	})
}

func TestFieldError(t *testing.T) {
	_, hostBits := policy.ParsePrefix("10.0.1.24/24")
	for _, tt := range []struct {
		err  policy.FieldError
		want string
	}{
		{
			policy.FieldError{Key: "nonMasqueradeCIDRs", Index: 2, Value: "10.0.1.24/24", Problem: hostBits.Error()},
			"nonMasqueradeCIDRs[2]: 10.0.1.24/24 has host bits set; did you mean 10.0.1.0/24?",
		},
		{policy.FieldError{Key: "sourceCIDRs", Index: 0, Problem: "is empty"}, "sourceCIDRs[0]: is empty"},
		{policy.FieldError{Key: "cidrLimit", Index: -1, Value: "0", Problem: "is below 1"}, "cidrLimit: 0 is below 1"},
		{policy.FieldError{Key: "k", Index: -1, Value: "two words", Problem: "is odd"}, `k: "two words" is odd`},
		{policy.FieldError{Key: "k", Index: -1, Value: `a"b`, Problem: "is odd"}, `k: "a\"b" is odd`},
		{policy.FieldError{Key: "k", Index: -1, Value: "a\\b", Problem: "is odd"}, `k: "a\\b" is odd`},
		{policy.FieldError{Key: "k", Index: -1, Value: "a\n", Problem: "is odd"}, `k: "a\n" is odd`},
		{
			policy.FieldError{Key: "k", Index: -1, Value: strings.Repeat("x", 257), Problem: "is odd"},
			`k: "` + strings.Repeat("x", 251) + `…" is odd`,
		},
		{
			policy.FieldError{Key: "k", Index: -1, Value: strings.Repeat("x", 256), Problem: "is odd"},
			"k: " + strings.Repeat("x", 256) + " is odd",
		},
		{policy.FieldError{Key: "masqLinklocal", Index: -1, Problem: "is unknown"}, "masqLinklocal: is unknown"},
		{policy.FieldError{Key: "a\nb", Index: -1, Problem: "is unknown"}, `"a\nb": is unknown`},
		{
			policy.FieldError{Key: strings.Repeat("k", 999), Index: -1, Problem: "is unknown"},
			`"` + strings.Repeat("k", 251) + `…": is unknown`,
		},
	} {
		wantError(t, tt.want, &tt.err, tt.want)
	}
}
