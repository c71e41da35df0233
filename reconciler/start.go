// SPDX-License-Identifier: Apache-2.0

//go:build !man

package main

import (
	"os"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
)

func main() {
	path := os.Getenv("PATH")
	iptables.SetEnvironment("TZ")
	os.Exit(run(os.Args[1:], path))
}
