// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxQuoted is the longest text, in bytes, that a message repeats of its input.
const maxQuoted = 256

// Quote quotes a text that comes from configuration, a file or the environment, for
// use in a message: on one line, at most 256 bytes.
func Quote(s string) string {
	const ellipsis = `…"`
	q := strconv.Quote(s[:min(len(s), maxQuoted)])
	if len(s) <= maxQuoted && len(q) <= maxQuoted {
		return q
	}
	return strings.ToValidUTF8(q[:min(len(q)-1, maxQuoted-len(ellipsis))], "") + ellipsis
}

// First returns the first items of a list for people, and one with the number of the others.
func First(limit int, items []string) []string {
	if more := len(items) - limit; more > 0 {
		return append(slices.Clone(items[:limit]), fmt.Sprintf("and %d more", more))
	}
	return items
}

// Printable returns the text as it is if it is short and printable on one line, and
// otherwise as Quote does.
func Printable(s string) string {
	return quoteIf(s, func(r rune) bool { return !strconv.IsPrint(r) })
}

// quoteUnlessWord quotes all but a short word of printable ASCII.
func quoteUnlessWord(s string) string {
	return quoteIf(s, func(r rune) bool { return r <= ' ' || r > '~' || r == '"' || r == '\\' })
}

func quoteIf(s string, special func(rune) bool) string {
	if len(s) > maxQuoted || !utf8.ValidString(s) || strings.ContainsFunc(s, special) {
		return Quote(s)
	}
	return s
}

// FieldError is a mistake in the value of one key of a document.
type FieldError struct {
	Key     string
	Index   int    // of the item in a list; -1 for a value that is no list
	Value   string // as written; "" if the value itself is of no interest
	Problem string // what is wrong and what to write instead
}

// Error returns nonMasqueradeCIDRs[2]: 10.0.1.24/24 has host bits set; did you mean
// 10.0.1.0/24?
func (e *FieldError) Error() string {
	text := quoteUnlessWord(e.Key) // an unknown key can be any text
	if e.Index >= 0 {
		text += fmt.Sprintf("[%d]", e.Index)
	}
	if e.Value != "" {
		return text + ": " + quoteUnlessWord(e.Value) + " " + e.Problem
	}
	return text + ": " + e.Problem
}

func firstOf(list []string) string { return strings.Join(First(8, list), ", ") }
