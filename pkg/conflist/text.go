// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"encoding/json"
)

// span is where a value stands in a text: its first byte, and the one behind it.
type span struct{ from, to int }

func (s span) in(doc []byte) []byte { return doc[s.from:s.to] }

// whole is the span of the value of a valid JSON text.
func whole(doc []byte) span {
	s := span{0, len(doc)}
	for s.from < s.to && isSpace(doc[s.from]) {
		s.from++
	}
	for s.from < s.to && isSpace(doc[s.to-1]) {
		s.to--
	}
	return s
}

// isSpace is white space as JSON has it (RFC 8259, section 2), no other.
func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

// parts returns where the items of a list stand, or in turn the keys and the
// values of an object, without the white space around them. The span must be
// that of a valid list or object.
func parts(doc []byte, of span) []span {
	var all []span
	depth, quoted := 0, false
	part := span{from: -1}
	for i := of.from + 1; i < of.to; i++ {
		c := doc[i]
		if !quoted && depth == 0 && (c == ',' || c == ':' || i == of.to-1) {
			if part.from >= 0 { // nothing in [] and {}
				all = append(all, part)
			}
			part = span{from: -1}
			continue
		}
		if !quoted && isSpace(c) {
			continue
		}
		if part.from < 0 {
			part.from = i
		}
		switch {
		case quoted && c == '\\':
			i++ // what follows is not the end of the string
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			depth++
		case c == '}' || c == ']':
			depth--
		}
		part.to = i + 1
	}
	return all
}

// value returns where the value of an object's key stands: of a key that comes
// twice the last one, which is the one that libcni reads.
func value(doc []byte, of span, key string) (span, bool) {
	all := parts(doc, of)
	for i := len(all) - 2; i >= 0; i -= 2 {
		var name string
		if err := json.Unmarshal(all[i].in(doc), &name); err == nil && name == key {
			return all[i+1], true
		}
	}
	return span{}, false
}
