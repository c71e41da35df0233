// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"fmt"
	"strings"
)

// KubeProxy is input of iptables-restore --noflush that makes so many rules in
// table nat as kube-proxy writes them, four for each service.
func KubeProxy(count int) string {
	var chains, rules strings.Builder
	chains.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n")
	for i := range count / 4 {
		service, endpoint := fmt.Sprintf("KUBE-SVC-%016d", i), fmt.Sprintf("KUBE-SEP-%016d", i)
		pod := fmt.Sprintf("10.1.%d.%d", i/250, i%250+1)
		fmt.Fprintf(&chains, ":%s - [0:0]\n:%s - [0:0]\n", service, endpoint)
		fmt.Fprintf(&rules, "-A KUBE-SERVICES -d 10.96.%d.%d/32 -p tcp -m comment --comment \"default/service-%d cluster IP\" -m tcp --dport 80 -j %s\n",
			i/250, i%250+1, i, service)
		fmt.Fprintf(&rules, "-A %s -m comment --comment \"default/service-%d -> %s:8080\" -j %s\n", service, i, pod, endpoint)
		fmt.Fprintf(&rules, "-A %s -s %s/32 -j KUBE-MARK-MASQ\n", endpoint, pod)
		fmt.Fprintf(&rules, "-A %s -p tcp -m tcp -j DNAT --to-destination %s:8080\n", endpoint, pod)
	}
	return chains.String() + rules.String() + "COMMIT\n"
}
