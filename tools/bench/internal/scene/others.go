// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"fmt"
	"net/netip"
	"strings"
)

// KubeProxyRules is how many rules a node has that has any of others.
const KubeProxyRules = 5000

// AddKubeProxy adds rules to table nat as kube-proxy writes them, four for each
// service.
func (n *Node) AddKubeProxy() error {
	var chains, rules strings.Builder
	chains.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n")
	for i := range KubeProxyRules / 4 {
		service, endpoint := fmt.Sprintf("KUBE-SVC-%016d", i), fmt.Sprintf("KUBE-SEP-%016d", i)
		pod := fmt.Sprintf("10.1.%d.%d", i/250, i%250+1)
		fmt.Fprintf(&chains, ":%s - [0:0]\n:%s - [0:0]\n", service, endpoint)
		fmt.Fprintf(&rules, "-A KUBE-SERVICES -d 10.96.%d.%d/32 -p tcp -m comment --comment \"default/service-%d cluster IP\" -m tcp --dport 80 -j %s\n",
			i/250, i%250+1, i, service)
		fmt.Fprintf(&rules, "-A %s -m comment --comment \"default/service-%d -> %s:8080\" -j %s\n", service, i, pod, endpoint)
		fmt.Fprintf(&rules, "-A %s -s %s/32 -j KUBE-MARK-MASQ\n", endpoint, pod)
		fmt.Fprintf(&rules, "-A %s -p tcp -m tcp -j DNAT --to-destination %s:8080\n", endpoint, pod)
	}
	return n.Feed(chains.String()+rules.String()+"COMMIT\n", "iptables-restore", "--noflush")
}

// AgentCycle writes table nat as the agents do every minute: the chain, flushed
// and filled again.
func (n *Node) AgentCycle(prefixes []netip.Prefix) error {
	return n.Feed(agentRules(prefixes), "iptables-restore", "--noflush")
}

// AgentJump puts the jump to the agents' chain in its place.
func (n *Node) AgentJump() error {
	return n.Feed("*nat\n-A POSTROUTING -m comment --comment \"ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom "+
		Chain+" chain\" -m addrtype ! --dst-type LOCAL -j "+Chain+"\nCOMMIT\n", "iptables-restore", "--noflush")
}

func agentRules(prefixes []netip.Prefix) string {
	const local, rest = "ip-masq-agent: local traffic is not subject to MASQUERADE", "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)"
	var b strings.Builder
	b.WriteString("*nat\n:" + Chain + " - [0:0]\n")
	for _, p := range prefixes {
		fmt.Fprintf(&b, "-A %s -m comment --comment %q -d %s -j RETURN\n", Chain, local, p)
	}
	fmt.Fprintf(&b, "-A %s -m comment --comment %q -j MASQUERADE --random-fully\nCOMMIT\n", Chain, rest)
	return b.String()
}
