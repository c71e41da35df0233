// SPDX-License-Identifier: Apache-2.0

package config

import (
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// PluginType is the "type" of our entries in conflists: the binary's name.
const PluginType = "ip-masq"

// Entry is what a conflist entry says.
type Entry struct {
	Network    string // the conf's name
	CNIVersion string // "" where the conf states none
	Policy     policy.SourcePolicy

	RequireAgentConfig bool
	CIDRLimit          int    // of this document; DefaultCIDRLimit where it states none
	DataDir            string // absolute and clean; DefaultDataDir where it states none
}

// ParseEntry reads a conflist entry as runtimes hand it to a plugin on its
// standard input: with the list's name and cniVersion in it, and with what else
// the CNI spec puts there (section "Plugin configuration objects").
//
// What is no JSON at all is an ErrNotJSON. Otherwise the error is a
// DocumentError with every mistake, and of the Entry the Network, where there
// is a usable one, and the CNIVersion are all that is set.
func ParseEntry(netconf []byte) (Entry, error) { return ReadNetconf(netconf).Entry() }

// ParseLenient finds what can be used of an entry that may be stale or bad: the
// network's name, "" where it has no usable one, and the dataDir,
// DefaultDataDir where it has none. It is for the verbs that must work whatever
// became of the configuration.
func ParseLenient(netconf []byte) (network, dataDir string) {
	e := ReadNetconf(netconf).Identity()
	return e.Network, e.DataDir
}

// identityKeys are the keys that say whose state an entry is about, where that is, and which
// version of the protocol the runtime speaks.
func (e *Entry) identityKeys() []Key {
	return []Key{
		{Name: "name", Value: networkName(&e.Network)},
		{Name: "dataDir", Value: directory(&e.DataDir, DefaultDataDir)},
		{Name: "cniVersion", Value: text(&e.CNIVersion, "1.0.0", anyText[string])},
	}
}

// ownKeys are the keys of an entry that are not about policy.
func (e *Entry) ownKeys() []Key {
	keys := append(e.identityKeys(),
		Key{Name: "requireAgentConfig", Value: boolean(&e.RequireAgentConfig)},
		Key{Name: "cidrLimit", Value: count(&e.CIDRLimit, 1, policy.MaxCIDRLimit)})
	for _, name := range othersKeys() {
		keys = append(keys, Key{Name: name})
	}
	return keys
}

// othersKeys are the CNI protocol's own. dns, ipam and ipMasq are conventions,
// which say nothing to a chained plugin.
func othersKeys() []string {
	return []string{"type", "prevResult", "runtimeConfig", "capabilities", "args", "ipam", "dns", "ipMasq"}
}
