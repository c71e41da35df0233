// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// jsonMembers returns the keys of a document that is a JSON object, with those
// that come twice.
func JSONMembers(doc []byte) ([]Member, error) {
	// RFC 8259 8.1: JSON text is UTF-8. The decoder would replace what is not.
	if at := invalidUTF8(doc); at >= 0 {
		return nil, notJSON(doc, at+1, "invalid UTF-8")
	}
	if !json.Valid(doc) {
		return nil, syntaxError(doc, json.Unmarshal(doc, &json.RawMessage{}))
	}
	whole := json.RawMessage(bytes.TrimSpace(doc))
	if k := KindOf(whole); k != Object {
		return nil, fmt.Errorf("configuration is JSON, but %s; write an object, in braces", k)
	}
	parts := Elements(whole)
	members := make([]Member, 0, len(parts)/2)
	for i := 0; i+1 < len(parts); i += 2 {
		name, _ := StringValue(parts[i])
		members = append(members, Member{Key: name, Value: parts[i+1]})
	}
	return members, nil
}

// elements returns the items of a list, or in turn the keys and the values of an
// object. It takes time in proportion to the text, which must be valid JSON
// without white space around it.
func Elements(value json.RawMessage) []json.RawMessage {
	var parts []json.RawMessage
	depth, start, quoted := 0, 1, false
	for i := 0; i < len(value); i++ {
		c := value[i]
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
		if quoted || depth > 1 || depth == 1 && c != ',' && c != ':' {
			continue
		}
		if part := bytes.TrimSpace(value[start:i]); len(part) > 0 { // nothing in [] and {}
			parts = append(parts, part)
		}
		start = i + 1
	}
	return parts
}

func invalidUTF8(doc []byte) int {
	if utf8.Valid(doc) {
		return -1
	}
	at := 0
	for {
		r, size := utf8.DecodeRune(doc[at:])
		if r == utf8.RuneError && size <= 1 {
			return at
		}
		at += size
	}
}

// syntaxError says where a document ceases to be JSON.
func syntaxError(doc []byte, err error) error {
	var syntax *json.SyntaxError
	switch {
	case len(bytes.TrimSpace(doc)) == 0:
		return fmt.Errorf("%w: it is empty", ErrNotJSON)
	case bytes.HasPrefix(doc, []byte("\ufeff")):
		return fmt.Errorf("%w: it begins with a byte order mark; save it without", ErrNotJSON)
	case errors.As(err, &syntax):
		return notJSON(doc, int(syntax.Offset), err.Error())
	default:
		return fmt.Errorf("%w: %s", ErrNotJSON, policy.Printable(err.Error()))
	}
}

// notJSON names the place of a byte, counted from 1.
func notJSON(doc []byte, nth int, problem string) error {
	before := doc[:max(0, min(nth, len(doc))-1)]
	line := 1 + bytes.Count(before, []byte("\n"))
	column := len(before) - bytes.LastIndexByte(before, '\n')
	return fmt.Errorf("%w: line %d, column %d: %s", ErrNotJSON, line, column, policy.Printable(problem))
}
