// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"fmt"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// warnNoEffect warns if packets of the pod usually pass no hook of the node. An ADD does not ask, and does
// not read the conflist, where the main plugin made an interface of the host.
func (n *node) warnNoEffect() {
	confs, _ := n.readConfDir() // which warns
	list := confs.WithEntry(n.network)
	if list == nil {
		return
	}
	plugin := list.NoHookPlugin()
	if plugin == "" {
		return
	}
	n.Warn(fmt.Errorf("network %s: packets of pods behind %s usually pass no hook of the node, "+
		"so ip-masq has no effect on them; remove the plugin entry, or use another main plugin",
		policy.Quote(n.network), plugin))
}
