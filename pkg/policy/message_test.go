// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

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
