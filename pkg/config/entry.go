// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// DefaultDataDir is the dataDir of plugin entries and of the reconciler that state none.
const DefaultDataDir = "/var/lib/cni/ip-masq"

// PluginType is the "type" of the plugin entry, which is the name of the binary.
const PluginType = "ip-masq"

// BootNetwork is the network of the GC that the boot unit calls. No conflist has it; status says when that GC
// ran.
const BootNetwork = "boot"

// Entry is the plugin entry of a network.
type Entry struct {
	Network    string // the name of the network
	CNIVersion string // "" if not stated
	Policy     policy.SourcePolicy

	RequireAgentConfig bool
	CIDRLimit          int    // DefaultCIDRLimit if not stated
	DataDir            string // absolute and clean; DefaultDataDir if not stated
}

// identityKeys are the keys that every verb needs, of invalid entries too.
func (e *Entry) identityKeys() []Key {
	return []Key{
		{Name: "name", Value: networkName(&e.Network)},
		{Name: "dataDir", Value: dataDirectory(&e.DataDir)},
		{Name: "cniVersion", Value: text(&e.CNIVersion, "1.0.0", anyText[string])},
	}
}

// protocolKeys are keys of the CNI protocol and its conventions that have no meaning here.
func protocolKeys() []string {
	return []string{"type", "prevResult", "runtimeConfig", "capabilities", "args", "ipam", "dns", "ipMasq"}
}

// Netconf is a plugin entry as runtimes write it to the standard input of the plugin (CNI spec,
// section "Plugin configuration objects"). It is parsed as JSON once, and not validated.
type Netconf struct {
	members []Member
	err     error // why it is no object
}

// ReadNetconf parses an entry. Err and Entry return what is wrong with it.
func ReadNetconf(text []byte) Netconf {
	members, err := JSONMembers(text)
	return Netconf{members, err}
}

// Entry validates the entry. An error is an ErrNotJSON or a DocumentError with every mistake;
// then the Entry has only the Network and the CNIVersion, if they are valid.
func (c Netconf) Entry() (Entry, error) {
	if c.err != nil {
		return Entry{}, c.err
	}
	e := Entry{
		Policy:    policy.SourcePolicy{Chain: policy.DefaultChain},
		CIDRLimit: policy.DefaultCIDRLimit,
		DataDir:   DefaultDataDir,
	}
	keys := append(e.identityKeys(), keysOf(e.Keys())...)
	for _, name := range protocolKeys() {
		keys = append(keys, Key{Name: name})
	}
	var d Document
	d.Read(c.members, keys)
	d.requireName(e.Network)
	d.ValidatePolicy(e.Policy, e.CIDRLimit)
	if err := d.Err(); err != nil {
		return Entry{Network: e.Network, CNIVersion: e.CNIVersion}, err
	}
	return e, nil
}

// Identity returns the valid Network, DataDir and CNIVersion of an entry, or their defaults.
func (c Netconf) Identity() Entry {
	e := Entry{DataDir: DefaultDataDir}
	for _, k := range e.identityKeys() {
		for _, m := range c.members {
			if m.Key == k.Name {
				k.Read(new(Document), m.Key, m.Value)
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
		value := "" // a value in JSON is never empty
		if !slices.Contains(protocolKeys(), m.Key) {
			value = string(m.Value)
		}
		texts = append(texts, m.Key, value)
	}
	return texts
}

// Err returns why it is not a JSON object, or nil.
func (c Netconf) Err() error { return c.err }

// Value returns the JSON value of a key, the last if there are several, or nil.
func (c Netconf) Value(key string) json.RawMessage {
	for _, m := range slices.Backward(c.members) {
		if m.Key == key {
			return m.Value
		}
	}
	return nil
}

// Differences returns the keys about policy and dataDir whose values differ in two netconfs, sorted.
func (c Netconf) Differences(d Netconf) []string {
	return Differences(c.policyValues(), d.policyValues())
}

// Differences returns the keys whose values differ, sorted. A missing key is like one with the value "".
func Differences(a, b map[string]string) []string {
	keys := maps.Clone(a)
	maps.Copy(keys, b)
	maps.DeleteFunc(keys, func(key, _ string) bool { return a[key] == b[key] })
	return slices.Sorted(maps.Keys(keys))
}

// Statements returns the keys that Differences compares, each with its value.
func (c Netconf) Statements() string {
	text, _ := json.Marshal(c.policyValues()) // sorts the keys
	return string(text)
}

// policyValues returns the values of the keys about policy and dataDir, without white space.
func (c Netconf) policyValues() map[string]string {
	notPolicy := append(protocolKeys(), "name", "cniVersion")
	values := map[string]string{}
	for _, m := range c.members {
		if !slices.Contains(notPolicy, m.Key) && !isReserved(m.Key) {
			var b bytes.Buffer
			_ = json.Compact(&b, m.Value) // members are valid JSON
			values[m.Key] = b.String()
		}
	}
	return values
}
