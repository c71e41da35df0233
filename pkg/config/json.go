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

// JSONMembers returns the keys of a JSON object, repeated ones included.
func JSONMembers(doc []byte) ([]Member, error) {
	// JSON is UTF-8 (RFC 8259, 8.1); the decoder would replace anything else.
	if !utf8.Valid(doc) {
		return nil, notJSON(doc, 1+validPrefix(doc), "invalid UTF-8")
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

// Elements returns the items of a list, or the keys and values of an object in turn. The
// text must be valid JSON without white space around it.
func Elements(value json.RawMessage) []json.RawMessage {
	var parts []json.RawMessage
	depth, start, quoted := 0, 1, false
	for i := 0; i < len(value); i++ {
		c := value[i]
		switch {
		case quoted && c == '\\':
			i++ // the next byte does not end the string
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
		if part := bytes.TrimSpace(value[start:i]); len(part) > 0 { // none in [] and {}
			parts = append(parts, part)
		}
		start = i + 1
	}
	return parts
}

// validPrefix returns the number of bytes before the first that is not UTF-8.
func validPrefix(doc []byte) int {
	for at := 0; ; {
		r, size := utf8.DecodeRune(doc[at:])
		if r == utf8.RuneError && size <= 1 {
			return at
		}
		at += size
	}
}

// syntaxError says where a document stops to be JSON.
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

// notJSON gives the position of a byte, counted from 1.
func notJSON(doc []byte, nth int, problem string) error {
	before := doc[:max(0, min(nth, len(doc))-1)]
	line := 1 + bytes.Count(before, []byte("\n"))
	column := len(before) - bytes.LastIndexByte(before, '\n')
	return fmt.Errorf("%w: line %d, column %d: %s", ErrNotJSON, line, column, policy.Printable(problem))
}
