// SPDX-License-Identifier: Apache-2.0

package config

import (
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// PluginType is the "type" of the plugin entry, which is the name of the binary.
const PluginType = "ip-masq"

// Entry is the plugin entry of a network.
type Entry struct {
	Network    string // the name of the network
	CNIVersion string // "" if not stated
	Policy     policy.SourcePolicy

	RequireAgentConfig bool
	CIDRLimit          int    // DefaultCIDRLimit if not stated
	DataDir            string // absolute and clean; DefaultDataDir if not stated
}

// ParseEntry parses a plugin entry as runtimes write it to the standard input of the plugin:
// with the list's name and cniVersion, and the other keys of the protocol (CNI spec, section
// "Plugin configuration objects").
//
// Text that is not JSON is an ErrNotJSON. Otherwise the error is a DocumentError with every
// mistake, and the Entry has only the Network, if it is valid, and the CNIVersion.
func ParseEntry(netconf []byte) (Entry, error) { return ReadNetconf(netconf).Entry() }

// ParseLenient returns the network and the dataDir of an entry that may be invalid. The
// network is "" and the dataDir is the default if the entry has no valid one.
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

// othersKeys are the keys of the CNI protocol. dns, ipam and ipMasq are conventions without a
// meaning for a chained plugin.
func othersKeys() []string {
	return []string{"type", "prevResult", "runtimeConfig", "capabilities", "args", "ipam", "dns", "ipMasq"}
}
