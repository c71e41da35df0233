// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/BurntSushi/toml"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// JSONMembers returns the keys of a JSON object, repeated ones included.
func JSONMembers(doc []byte) ([]Member, error) {
	// JSON is UTF-8 (RFC 8259, 8.1); the decoder would replace anything else.
	if !utf8.Valid(doc) {
		valid := 0
		for r, size := rune(0), 0; r != utf8.RuneError || size > 1; r, size = utf8.DecodeRune(doc[valid:]) {
			valid += size
		}
		return nil, notJSON(doc, 1+valid, "invalid UTF-8")
	}
	if !json.Valid(doc) {
		return nil, syntaxError(doc, json.Unmarshal(doc, &json.RawMessage{}))
	}
	whole := json.RawMessage(bytes.TrimSpace(doc))
	if k := KindOf(whole); k != Object {
		return nil, fmt.Errorf("configuration is JSON, but %s; write an object, in braces", k)
	}
	parts := elements(whole)
	members := make([]Member, 0, len(parts)/2)
	for i := 0; i+1 < len(parts); i += 2 {
		name, _ := stringValue(parts[i])
		members = append(members, Member{Key: name, Value: parts[i+1]})
	}
	return members, nil
}

// elements returns the items of a list, or the keys and values of an object in turn. The
// text must be valid JSON without white space around it.
func elements(value json.RawMessage) []json.RawMessage {
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

// syntaxError returns the position at which a document stops to be JSON.
func syntaxError(doc []byte, err error) error {
	var syntax *json.SyntaxError
	switch {
	case len(bytes.TrimSpace(doc)) == 0:
		return fmt.Errorf("%w: it is empty", ErrNotJSON)
	case bytes.HasPrefix(doc, []byte("\ufeff")):
		return fmt.Errorf("%w: it begins with a byte order mark; save it without", ErrNotJSON)
	case errors.As(err, &syntax):
		return notJSON(doc, int(syntax.Offset), err.Error())
	}
	return fmt.Errorf("%w: %s", ErrNotJSON, policy.Printable(err.Error()))
}

// notJSON gives the position of a byte, counted from 1.
func notJSON(doc []byte, nth int, problem string) error {
	before := doc[:max(0, min(nth, len(doc))-1)]
	line := 1 + bytes.Count(before, []byte("\n"))
	column := len(before) - bytes.LastIndexByte(before, '\n')
	return fmt.Errorf("%w: line %d, column %d: %s", ErrNotJSON, line, column, policy.Printable(problem))
}

// maxTOMLSize is in bytes. The decoder can take quadratic time.
const maxTOMLSize = 64 << 10

// tomlMembers returns the top-level keys of a TOML document in their order. The keys of the
// given tables follow as "table.key".
func tomlMembers(file string, doc []byte, tables ...string) ([]Member, error) {
	var values map[string]any
	var undecoded map[string]toml.Primitive
	md, err := toml.Decode(string(doc), &undecoded)
	if err == nil {
		_, err = toml.Decode(string(doc), &values)
	}
	var syntax toml.ParseError
	d := Document{File: file}
	switch {
	case errors.As(err, &syntax) && syntax.Position.Line > 0:
		return nil, d.Locate(syntax.Position.Line, errors.New("not TOML: "+policy.Printable(syntax.Message)))
	case err != nil:
		return nil, d.Locate(0, errors.New("not TOML: "+policy.Printable(err.Error())))
	}
	const maxLines = 8 * MaxShown // finding a line takes time, and few are shown
	var members []Member
	seen := map[string]bool{}
	for _, path := range md.Keys() {
		m, value, parents := Member{Key: path[0]}, values[path[0]], 0
		if table, isTable := value.(map[string]any); isTable && len(path) > 1 && slices.Contains(tables, path[0]) {
			m.Key += "." + path[1]
			value, parents = table[path[1]], 1
		}
		if seen[m.Key] {
			continue
		}
		seen[m.Key] = true
		if m.Value, err = json.Marshal(value); err != nil {
			m.Err = errors.New("holds a number that is not finite; write a finite one")
		}
		if len(members) < maxLines {
			m.Line = tomlLine(&md, path, parents, undecoded)
		}
		members = append(members, m)
	}
	return members, nil
}

// tomlLine returns the line of a key below so many parents. A table that exists only through
// a dotted key (a.b = 1) has the line of that key.
func tomlLine(md *toml.MetaData, path toml.Key, parents int, values map[string]toml.Primitive) int {
	for i, name := range path {
		value := values[name]
		var at toml.ParseError
		if i >= parents && errors.As(md.PrimitiveDecode(value, &locator{}), &at) && at.Position.Line > 0 {
			return at.Position.Line
		}
		values = nil
		if err := md.PrimitiveDecode(value, &values); err != nil {
			return 0
		}
	}
	return 0
}

// locator refuses any value, because only the decoder's errors have a position.
type locator struct{}

// UnmarshalTOML implements toml.Unmarshaler.
func (*locator) UnmarshalTOML(any) error { return errors.New("position") }
