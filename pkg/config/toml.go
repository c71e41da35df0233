// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/BurntSushi/toml"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// tomlMembers returns the top-level keys of a TOML document in their order, with
// their values as JSON and the lines on which they stand.
func tomlMembers(file string, doc []byte) ([]Member, error) {
	var values map[string]toml.Primitive
	md, err := toml.Decode(string(doc), &values)
	if err != nil {
		return nil, tomlError(file, err)
	}
	members, err := tomlTable(&md, md.Keys(), values)
	if err != nil {
		return nil, tomlError(file, err)
	}
	return members, nil
}

// tomlTableIn returns the keys of a table of the document. It is false where
// what has the name is no table, or is not there.
func tomlTableIn(file string, doc []byte, table string) (members []Member, found bool, err error) {
	var tables map[string]toml.Primitive
	md, err := toml.Decode(string(doc), &tables)
	if err != nil {
		return nil, false, tomlError(file, err)
	}
	value, isThere := tables[table]
	if !isThere || !isTable(&md, value) {
		return nil, false, nil
	}
	var values map[string]toml.Primitive
	if err := md.PrimitiveDecode(value, &values); err != nil {
		return nil, false, tomlError(file, err)
	}
	var below []toml.Key
	for _, path := range md.Keys() {
		if path[0] == table && len(path) > 1 {
			below = append(below, path[1:])
		}
	}
	members, err = tomlTable(&md, below, values)
	if err != nil {
		return nil, false, tomlError(file, err)
	}
	return members, true, nil
}

func isTable(md *toml.MetaData, value toml.Primitive) bool {
	var p probe
	if err := md.PrimitiveDecode(value, &p); err != nil {
		return false
	}
	_, is := p.value.(map[string]any)
	return is
}

// tomlTable returns the keys of one table, given the paths of all that is in it.
func tomlTable(md *toml.MetaData, paths []toml.Key, values map[string]toml.Primitive) ([]Member, error) {
	// To find a line takes time in proportion to the document, and few are shown.
	const mostLines = 4 * MaxShown
	var members []Member
	known := map[string]bool{}
	for _, path := range paths {
		name := path[0]
		if known[name] {
			continue
		}
		known[name] = true
		var p probe
		if err := md.PrimitiveDecode(values[name], &p); err != nil {
			return nil, err
		}
		m := Member{Key: name}
		m.Value, m.Err = tomlToJSON(p.value)
		if len(members) < mostLines {
			m.Line = tomlLine(md, path, values)
		}
		members = append(members, m)
	}
	return members, nil
}

func tomlError(file string, err error) error {
	var syntax toml.ParseError
	if errors.As(err, &syntax) && syntax.Position.Line > 0 {
		return fmt.Errorf("%s:%d: not TOML: %s", policy.Printable(file), syntax.Position.Line, policy.Printable(syntax.Message))
	}
	return fmt.Errorf("%s: not TOML: %s", policy.Printable(file), policy.Printable(err.Error()))
}

// tomlLine returns the line of a key, which only an error of the decoder tells.
// A table that is there for a dotted key alone (a.b = 1) has the line of that.
func tomlLine(md *toml.MetaData, path toml.Key, values map[string]toml.Primitive) int {
	for _, name := range path {
		value := values[name]
		var told toml.ParseError
		if errors.As(md.PrimitiveDecode(value, &probe{err: errProbe}), &told) && told.Position.Line > 0 {
			return told.Position.Line
		}
		values = nil
		if err := md.PrimitiveDecode(value, &values); err != nil {
			return 0
		}
	}
	return 0
}

var errProbe = errors.New("asked for the line")

// probe takes a value as the decoder has it, and then fails if it is to.
type probe struct {
	value any
	err   error
}

// UnmarshalTOML implements toml.Unmarshaler.
func (p *probe) UnmarshalTOML(value any) error {
	p.value = value
	return p.err
}

// tomlToJSON writes a value as JSON, as which the readers of keys take it.
func tomlToJSON(value any) (json.RawMessage, error) {
	if err := inJSON(value); err != nil {
		return nil, err
	}
	text, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("has a value that JSON has no form for: %s", policy.Printable(err.Error()))
	}
	return text, nil
}

// inJSON finds what TOML has and JSON has not. A date would pass for a string.
func inJSON(value any) error {
	switch v := value.(type) {
	case time.Time:
		return errors.New("holds a date without quotes; write a string in quotes")
	case float64:
		if math.IsInf(v, 0) || math.IsNaN(v) {
			return errors.New("holds a number that is not finite; write a finite one")
		}
	case []any:
		for _, item := range v {
			if err := inJSON(item); err != nil {
				return err
			}
		}
	case map[string]any:
		for _, item := range v {
			if err := inJSON(item); err != nil {
				return err
			}
		}
	case []map[string]any:
		for _, item := range v {
			if err := inJSON(item); err != nil {
				return err
			}
		}
	}
	return nil
}
