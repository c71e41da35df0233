// SPDX-License-Identifier: Apache-2.0

package agentconfig

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

var comparePrefixes = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })

func write(t testing.TB, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func prefixes(cidrs ...string) []netip.Prefix {
	all := []netip.Prefix{}
	for _, c := range cidrs {
		all = append(all, netip.MustParsePrefix(c))
	}
	return all
}

// checkMessage checks that a message is one line of printable text, of bounded length.
func checkMessage(t testing.TB, err error) {
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

// wantError compares a message in which FILE stands for the path.
func wantError(t testing.TB, err error, path, want string) {
	t.Helper()
	checkMessage(t, err)
	if got := strings.ReplaceAll(err.Error(), path, "FILE"); got != want {
		t.Errorf("message\n%s\nwant\n%s", got, want)
	}
}
