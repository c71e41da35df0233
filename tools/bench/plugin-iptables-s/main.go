// SPDX-License-Identifier: Apache-2.0

// Command plugin-iptables-s is a chained CNI plugin that lists the chain with `iptables -S` once
// per family.
package main

import (
	"bytes"
	"fmt"
	"os/exec"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chained"
)

func main() { chained.Main("plugin-iptables-s", verify) }

func verify(c chained.Conf) error {
	for _, program := range c.Protocols() {
		rules, err := exec.Command(program, "-w", "-t", "nat", "-S", c.Chain).Output()
		if err != nil {
			return fmt.Errorf("list chain %s by %s: %w", c.Chain, program, err)
		}
		if !bytes.Contains(rules, []byte("-j MASQUERADE")) {
			return fmt.Errorf("%s: chain %s masquerades nothing", program, c.Chain)
		}
	}
	return nil
}
