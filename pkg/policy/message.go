// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxQuoted is the longest text, in bytes, that a message repeats of what it
// was given.
const maxQuoted = 256

// Quote writes text that came from configuration, a file or the environment
// into a message: quoted, on one line, never longer than 256 bytes.
func Quote(s string) string {
	const ellipsis = `…"`
	q := strconv.Quote(s[:min(len(s), maxQuoted)])
	if len(s) <= maxQuoted && len(q) <= maxQuoted {
		return q
	}
	return strings.ToValidUTF8(q[:min(len(q)-1, maxQuoted-len(ellipsis))], "") + ellipsis
}

// Printable makes a text fit for a message, and leaves it as it is where it is that
// already: one line that can be printed, and not long.
func Printable(s string) string {
	unprintable := func(r rune) bool { return !strconv.IsPrint(r) }
	if len(s) > maxQuoted || !utf8.ValidString(s) || strings.ContainsFunc(s, unprintable) {
		return Quote(s)
	}
	return s
}

// FieldError is a mistake in the value of one key of a document.
type FieldError struct {
	Key     string
	Index   int    // of the item in a list; -1 for a value that is no list
	Value   string // as written; "" where the value itself says nothing
	Problem string // what is wrong and what to write instead
}

// Error writes nonMasqueradeCIDRs[2]: 10.0.1.24/24 has host bits set; did you
// mean 10.0.1.0/24?
func (e *FieldError) Error() string {
	var b strings.Builder
	b.WriteString(plainOrQuoted(e.Key)) // an unknown key says anything
	if e.Index >= 0 {
		fmt.Fprintf(&b, "[%d]", e.Index)
	}
	b.WriteString(": ")
	if e.Value != "" {
		b.WriteString(plainOrQuoted(e.Value) + " ")
	}
	return b.String() + e.Problem
}

// plainOrQuoted leaves what reads as one word as it is.
func plainOrQuoted(s string) string {
	odd := func(r rune) bool { return r <= ' ' || r > '~' || r == '"' || r == '\\' }
	if len(s) > maxQuoted || strings.ContainsFunc(s, odd) {
		return Quote(s)
	}
	return s
}

// onOneLine writes what somebody else put into the kernel: as it is where it is
// one line of visible text.
func onOneLine(s string) string {
	if len(s) > maxQuoted || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return Quote(s)
	}
	return s
}
