// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
)

// KubeProxyRules is the number of kube-proxy rules on a node that has third-party rules.
const KubeProxyRules = 5000

// AddKubeProxy adds rules to table nat as kube-proxy writes them.
func (n *Node) AddKubeProxy() error {
	return n.Feed(fixtures.KubeProxy(KubeProxyRules), "iptables-restore", "--noflush")
}

// AgentScript returns the agents' rules of a policy as input of iptables-restore.
func AgentScript(prefixes []netip.Prefix) string {
	const local, rest = "ip-masq-agent: local traffic is not subject to MASQUERADE", "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)"
	var b strings.Builder
	b.WriteString("*nat\n:" + Chain + " - [0:0]\n")
	for _, p := range prefixes {
		fmt.Fprintf(&b, "-A %s -m comment --comment %q -d %s -j RETURN\n", Chain, local, p)
	}
	fmt.Fprintf(&b, "-A %s -m comment --comment %q -j MASQUERADE --random-fully\nCOMMIT\n", Chain, rest)
	return b.String()
}
