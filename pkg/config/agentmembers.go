// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/ip-masq/ip-masq-cni/pkg/document"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// agentMembers returns the keys of an agent file, with those that come twice.
// JSON is read as JSON, whose white space is not all YAML's.
func agentMembers(file string, doc []byte, decode document.Decoder) (members []Member, more bool, err error) {
	d, err := decode(doc)
	if looksLikeJSON(doc) {
		members, err := JSONMembers(doc)
		if err != nil {
			return nil, false, fmt.Errorf("%s: %w", policy.Printable(file), err)
		}
		addLines(members, d.Keys)
		return members, false, nil
	}
	if err != nil {
		return nil, false, undecodable(file, err)
	}
	text := json.RawMessage(bytes.TrimSpace(d.JSON))
	switch k := KindOf(text); {
	case k == Null:
		return nil, d.More, nil
	case k != Object || d.Keys == nil:
		return nil, false, fmt.Errorf("%s:%d: is %s; write keys with values, such as nonMasqueradeCIDRs: [10.0.0.0/8]", policy.Printable(file), d.Line, k)
	}
	values := map[string]json.RawMessage{}
	parts := Elements(text)
	for i := 0; i+1 < len(parts); i += 2 {
		name, _ := StringValue(parts[i])
		values[name] = parts[i+1]
	}
	for _, k := range d.Keys {
		m := Member{Key: k.Name}
		value, isThere := values[m.Key]
		if m.Value = value; !isThere {
			m.Err = errors.New("is not a plain key; write the key as it is, without a tag")
		}
		members = append(members, m)
	}
	addLines(members, d.Keys)
	return members, d.More, nil
}

// undecodable makes one line of a decoder's error.
func undecodable(file string, err error) error {
	var e *document.Error
	if !errors.As(err, &e) {
		return fmt.Errorf("%s: %s", policy.Printable(file), policy.Printable(err.Error()))
	}
	text := policy.Printable(e.Problem)
	if e.Subject != "" {
		text = policy.Printable(e.Subject) + ": " + text
	}
	if e.Line > 0 {
		return fmt.Errorf("%s:%d: %s", policy.Printable(file), e.Line, text)
	}
	return fmt.Errorf("%s: %s", policy.Printable(file), text)
}

func looksLikeJSON(doc []byte) bool {
	return bytes.HasPrefix(bytes.TrimSpace(doc), []byte("{")) && json.Valid(doc)
}

// addLines says where the keys stand, if these are the same ones.
func addLines(members []Member, keys []document.Key) {
	if len(keys) != len(members) {
		return
	}
	for i, k := range keys {
		members[i].Line, members[i].ItemLines = k.Line, k.Items
	}
}
