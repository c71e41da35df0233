// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"slices"
)

// NoHookPlugin returns the type of the main plugin if packets of its pods usually pass no hook of the node,
// so that ip-masq has no effect on them; otherwise "". The pod's interface is one of the host's, or is on top
// of one, and packets leave through that. Another plugin can route them through the node all the same, so
// nothing fails because of it.
func (l Conflist) NoHookPlugin() string {
	for i, kind := range l.Types {
		if kind == PluginType {
			return "" // what comes before it makes the interface
		}
		if found := noHookPlugin(l.Plugins[i]); found != "" {
			return found
		}
	}
	return ""
}

// noHookPlugin returns the type of a plugin whose packets usually pass no hook of the node, or of such a
// one that it delegates to; else "".
func noHookPlugin(conf json.RawMessage) string {
	var plugin struct {
		Type     string          `json:"type"`
		Mode     string          `json:"mode"`
		Delegate json.RawMessage `json:"delegate"`
	}
	// Other plugins may have values of any type in these keys.
	if json.Unmarshal(conf, &plugin) != nil {
		return ""
	}
	direct := []string{"macvlan", "macvtap", "vlan", "sriov", "ib-sriov", "host-device"}
	switch {
	case slices.Contains(direct, plugin.Type):
		return plugin.Type
	case plugin.Type == "ipvlan" && plugin.Mode != "l3s": // which passes the hooks of the host's interface
		return plugin.Type
	case len(plugin.Delegate) > 0:
		return noHookPlugin(plugin.Delegate)
	}
	return ""
}
