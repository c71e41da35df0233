// SPDX-License-Identifier: Apache-2.0

package config

// usageOf tells in one line what a key of the settings does.
func usageOf(key string) string {
	return map[string]string{
		"resync_interval":  "verify every rule after this `TIME` too, beside the events: 60s, 2m, or seconds",
		"backend":          "`BACKEND` of chains of which no source states one: auto, iptables or nftables",
		"cni_conf_dir":     "`DIR` of the conflists that the container runtime reads",
		"cni_bin_dir":      "`DIR` of the CNI plugins that the container runtime runs",
		"agent_config_dir": "`DIR` of the agents' files (ip-masq*), such as /etc/config; none if not given",
		"agent_dialect":    "what an agent file without nonMasqueradeCIDRs means: `v1`, it leaves the list to others; v2, it means none",
		"data_dir":         "`DIR` of the node's state; the plugin has to have the same",
		"health_listen":    "`HOST:PORT` of /livez, /readyz and /healthz; empty for off",
		"metrics_listen":   "`HOST:PORT` of /metrics; off if not given",
		"log_format":       "`FORMAT` of the log: text or json",

		"agent.nonMasqueradeCIDRs":       "`CIDRS` to leave alone, with commas between; empty for none; the private ranges if nobody states any",
		"agent.masqueradeCIDRs":          "`CIDRS` to masquerade although a wider prefix exempts them, with commas between",
		"agent.nomasqAllReservedRanges":  "leave every range alone that an RFC reserves, where no nonMasqueradeCIDRs are stated",
		"agent.masqLinkLocal":            "masquerade 169.254.0.0/16 too",
		"agent.masqLinkLocalIPv6":        "masquerade fe80::/10 too",
		"agent.enableIPv6":               "manage IPv6 as well, for all of the agents' files",
		"agent.sourceCIDRs":              "look only at traffic from these `CIDRS`, with commas between",
		"agent.nonMasqueradeSourceCIDRs": "`CIDRS` of sources never to masquerade, with commas between",
		"agent.outputInterfaces":         "look only at traffic that leaves through these `INTERFACES`, with commas between; wg+ for all whose names begin with wg",
		"agent.masqueradeHost":           "masquerade what the node itself sends too (=false: leave it alone)",
		"agent.randomFully":              "choose source ports fully at random, where the kernel can (=false: as the kernel likes)",
		"agent.toPorts":                  "source `PORTS` to use, such as 1024-29999,32768-65535; empty leaves them to the kernel",
		"agent.masqChain":                "`NAME` of the chain, IP-MASQ-AGENT if nobody states one; another keeps this policy apart from those of other sources",
		"agent.backend":                  "backend of this chain: auto, iptables or nftables",
		"agent.cidrLimit":                "most CIDRs (`N`, 64 if not given) that may be stated here together",

		"conflist.manage":     "put our entry back when it is gone from the conflist",
		"conflist.network":    "`NETWORK` whose conflist gets the entry; the one that the runtime picks if not given",
		"conflist.entry_file": "`FILE` with the entry to put there, as JSON",
	}[key]
}
