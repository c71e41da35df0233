// SPDX-License-Identifier: Apache-2.0

// Command plugin-go-iptables is a chained CNI plugin that verifies rules with
// github.com/coreos/go-iptables: it checks that the jump exists and lists the chain.
package main

import (
	"fmt"
	"strings"

	"github.com/coreos/go-iptables/iptables"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chained"
)

// comment is the comment of the agents' jump and of ip-masq's.
const comment = "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain"

func main() { chained.Main("plugin-go-iptables", verify) }

func verify(c chained.Conf) error {
	for _, program := range c.Protocols() {
		protocol := iptables.ProtocolIPv4
		if program == "ip6tables" {
			protocol = iptables.ProtocolIPv6
		}
		ipt, err := iptables.NewWithProtocol(protocol)
		if err != nil {
			return fmt.Errorf("find %s: %w", program, err)
		}
		there, err := ipt.Exists("nat", "POSTROUTING", "-m", "comment", "--comment", comment,
			"-m", "addrtype", "!", "--dst-type", "LOCAL", "-j", c.Chain)
		if err != nil || !there {
			return fmt.Errorf("find the jump to chain %s by %s: found %v: %w", c.Chain, program, there, err)
		}
		rules, err := ipt.List("nat", c.Chain)
		if err != nil {
			return fmt.Errorf("list chain %s by %s: %w", c.Chain, program, err)
		}
		if !strings.Contains(strings.Join(rules, "\n"), "-j MASQUERADE") {
			return fmt.Errorf("%s: chain %s masquerades nothing", program, c.Chain)
		}
	}
	return nil
}
