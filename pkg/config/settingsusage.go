// SPDX-License-Identifier: Apache-2.0

package config

// usageOf tells in one line what a key of the settings does.
func usageOf(key string) string {
	return map[string]string{
		"resync_interval":  "how often to verify every rule, beside the events: 60s, 2m, or seconds",
		"backend":          "what keeps the rules in the kernel: auto, iptables or nftables",
		"cni_conf_dir":     "directory of the conflists that the container runtime reads",
		"cni_bin_dir":      "directory of the CNI plugins that the container runtime runs",
		"agent_config_dir": "directory of the agents' files (ip-masq*), such as /etc/config; empty for none",
		"agent_dialect":    "what a file without nonMasqueradeCIDRs means: v1, it leaves the list to others; v2, it means none",
		"data_dir":         "directory of the node's state; the plugin has to have the same",
		"health_listen":    "address of /livez, /readyz and /healthz, HOST:PORT; empty for off",
		"metrics_listen":   "address of /metrics, HOST:PORT; empty for off",
		"log_format":       "how to log: text or json",

		"agent.nonMasqueradeCIDRs":       "destinations to leave alone, with commas between; empty for none; not given: the private ranges",
		"agent.masqueradeCIDRs":          "destinations to masquerade although a wider prefix exempts them, with commas between",
		"agent.nomasqAllReservedRanges":  "leave every range alone that an RFC reserves, where no nonMasqueradeCIDRs are stated",
		"agent.masqLinkLocal":            "masquerade 169.254.0.0/16 too",
		"agent.masqLinkLocalIPv6":        "masquerade fe80::/10 too",
		"agent.enableIPv6":               "manage IPv6 as well, for all of the agents' files",
		"agent.sourceCIDRs":              "look only at traffic from these sources, with commas between",
		"agent.nonMasqueradeSourceCIDRs": "sources never to masquerade, with commas between",
		"agent.outputInterfaces":         "look only at traffic that leaves through these, with commas between; wg+ for all whose names begin with wg",
		"agent.masqueradeHost":           "masquerade what the node itself sends too",
		"agent.randomFully":              "choose source ports fully at random, where the kernel can",
		"agent.toPorts":                  "source ports to use, such as 1024-29999,32768-65535; empty leaves them to the kernel",
		"agent.masqChain":                "name of the chain; another name keeps this policy apart from those of other sources",
		"agent.backend":                  "backend of this chain: auto, iptables or nftables",
		"agent.cidrLimit":                "most nonMasqueradeCIDRs and masqueradeCIDRs that may be stated here together",

		"conflist.manage":     "put our entry back when it is gone from the conflist",
		"conflist.network":    "network whose conflist gets the entry; empty for the one that the runtime picks",
		"conflist.entry_file": "file with the entry to put there, as JSON",
	}[key]
}
