// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Netconf is an entry as a runtime writes it to the standard input of a plugin: parsed as
// JSON once, and not validated.
type Netconf struct {
	members []Member
	err     error // why it is no object
}

// ReadNetconf parses an entry. Its methods return what is wrong with it.
func ReadNetconf(text []byte) Netconf {
	members, err := JSONMembers(text)
	return Netconf{members, err}
}

// Entry validates it, as ParseEntry does.
func (c Netconf) Entry() (Entry, error) {
	if c.err != nil {
		return Entry{}, c.err
	}
	e := Entry{
		Policy:    policy.SourcePolicy{Chain: policy.DefaultChain},
		CIDRLimit: policy.DefaultCIDRLimit,
		DataDir:   DefaultDataDir,
	}
	var f Document
	f.Read(c.members, append(e.ownKeys(), policyKeys(&e.Policy)...))
	if e.Network == "" && !f.Flawed["name"] {
		f.failWithoutName()
	}
	f.ValidatePolicy(e.Policy, e.CIDRLimit)
	if err := f.Err(); err != nil {
		return Entry{Network: e.Network, CNIVersion: e.CNIVersion}, err
	}
	return e, nil
}

// Identity finds what can be used of an entry that may be stale or bad: its
// Network, DataDir and CNIVersion. The rest is not set.
func (c Netconf) Identity() Entry {
	e := Entry{DataDir: DefaultDataDir}
	var unheard Document
	for _, k := range e.identityKeys() {
		for _, m := range c.members {
			if m.Key == k.Name {
				k.Read(&unheard, m.Key, m.Value)
			}
		}
	}
	return e
}

// PolicyTexts returns everything that Entry depends on: the keys, and the values as written,
// without the values of the protocol's keys, which differ from pod to pod.
func (c Netconf) PolicyTexts() []string {
	texts := make([]string, 0, 2*len(c.members))
	for _, m := range c.members {
		value := "" // which no value is
		if !slices.Contains(othersKeys(), m.Key) {
			value = string(m.Value)
		}
		texts = append(texts, m.Key, value)
	}
	return texts
}

// Err returns why it is not a JSON object, or nil.
func (c Netconf) Err() error { return c.err }

// Value returns the JSON value of a key, the last if there are several, or nil.
func (c Netconf) Value(key string) (value json.RawMessage) {
	for _, m := range c.members {
		if m.Key == key {
			value = m.Value
		}
	}
	return value
}

// Differences returns the keys about policy in which two netconfs differ, sorted.
func (c Netconf) Differences(d Netconf) []string {
	mine, others := c.stated(), d.stated()
	var keys []string
	for key, value := range mine {
		if other, there := others[key]; !there || !sameJSON(value, other) {
			keys = append(keys, key)
		}
	}
	for key := range others {
		if _, there := mine[key]; !there {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// stated returns the values of the keys that are not the protocol's. What is known
// of the dataDir otherwise holds.
func (c Netconf) stated() map[string]json.RawMessage {
	notPolicy := append(othersKeys(), "name", "cniVersion", "dataDir")
	values := map[string]json.RawMessage{}
	for _, m := range c.members {
		if !slices.Contains(notPolicy, m.Key) && !isProtocolKey(m.Key) {
			values[m.Key] = m.Value
		}
	}
	return values
}

// sameJSON compares two values, but for white space.
func sameJSON(a, b json.RawMessage) bool {
	if bytes.Equal(a, b) {
		return true
	}
	var bareA, bareB bytes.Buffer
	return json.Compact(&bareA, a) == nil && json.Compact(&bareB, b) == nil && bytes.Equal(bareA.Bytes(), bareB.Bytes())
}
