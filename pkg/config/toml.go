// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

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
	switch {
	case errors.As(err, &syntax) && syntax.Position.Line > 0:
		return nil, fmt.Errorf("%s:%d: not TOML: %s", policy.Printable(file), syntax.Position.Line, policy.Printable(syntax.Message))
	case err != nil:
		return nil, fmt.Errorf("%s: not TOML: %s", policy.Printable(file), policy.Printable(err.Error()))
	}
	const maxLines = 4 * MaxShown // finding a line takes time, and few are shown
	var members []Member
	seen := map[string]bool{}
	for _, path := range md.Keys() {
		m := Member{Key: path[0]}
		value, below, within := values[path[0]], path, undecoded
		if table, isTable := value.(map[string]any); isTable && len(path) > 1 && slices.Contains(tables, path[0]) {
			m.Key += "." + path[1]
			value, below, within = table[path[1]], path[1:], nil
			if err := md.PrimitiveDecode(undecoded[path[0]], &within); err != nil {
				return nil, fmt.Errorf("%s: not TOML: %s", policy.Printable(file), policy.Printable(err.Error()))
			}
		} else if before, _, _ := strings.Cut(path[0], "."); before != path[0] && slices.Contains(tables, before) {
			m.Key = strconv.Quote(m.Key) // a quoted key with a dot is not the key of a table
		}
		if seen[m.Key] {
			continue
		}
		seen[m.Key] = true
		if m.Value, err = json.Marshal(value); err != nil {
			m.Err = errors.New("holds a number that is not finite; write a finite one")
		}
		if len(members) < maxLines {
			m.Line = tomlLine(&md, below, within)
		}
		members = append(members, m)
	}
	return members, nil
}

// tomlLine returns the line of a key. A table that exists only through a dotted key
// (a.b = 1) has the line of that key.
func tomlLine(md *toml.MetaData, path toml.Key, values map[string]toml.Primitive) int {
	for _, name := range path {
		value := values[name]
		var at toml.ParseError
		if errors.As(md.PrimitiveDecode(value, &locator{}), &at) && at.Position.Line > 0 {
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
