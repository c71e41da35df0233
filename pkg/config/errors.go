// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"strings"
)

// ErrNotJSON is what a document that is no JSON text at all (RFC 8259) is
// refused with. CNI tells it apart, by error code 6, from a configuration that
// is JSON and wrong (CNI spec, section "Error").
var ErrNotJSON = errors.New("configuration is not JSON")

// How much of a document's mistakes a message spells out.
const (
	MaxShown     = 8
	mostShownText = 4096 // bytes
	mostShownWord = 256  // bytes, as in policy.Quote
)

// mostMistakes is the number of mistakes after which the items of a document's lists
// are not read any more: it is refused anyway.
const mostMistakes = 10_000

// DocumentError is every mistake of one document, in the order in which the
// document has them; what no single key is to blame for comes last.
type DocumentError struct{ Mistakes []error }

// Error writes the first mistakes in one line and counts the others.
func (e *DocumentError) Error() string {
	var b strings.Builder
	for i, mistake := range e.Mistakes {
		text := mistake.Error()
		if i == MaxShown || i > 0 && b.Len()+len(text) > mostShownText {
			fmt.Fprintf(&b, "; and %d more", len(e.Mistakes)-i)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(text)
	}
	return b.String()
}

// Unwrap returns the mistakes, policy.FieldErrors for all that is about a key.
func (e *DocumentError) Unwrap() []error { return e.Mistakes }
