// SPDX-License-Identifier: Apache-2.0

// Command cniconf runs the part of the Cilium agent that writes Cilium's conflist, with the agent's
// flags of that part, until it gets SIGTERM. The rest of the agent needs a cluster.
//
//	cniconf --write-cni-conf-when-ready=/etc/cni/net.d/05-cilium.conflist --cni-exclusive=true
package main

import (
	"fmt"
	"log/slog"
	"os"

	"github.com/cilium/cilium/daemon/cmd/cni"
	"github.com/cilium/cilium/pkg/option"
	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/spf13/pflag"
)

func main() {
	agent := hive.New(
		cni.Cell,
		cell.Provide(func() *option.DaemonConfig { return &option.DaemonConfig{} }),
		cell.Invoke(func(cni.CNIConfigManager) {}),
	)
	flags := pflag.NewFlagSet("cniconf", pflag.ExitOnError)
	agent.RegisterFlags(flags)
	_ = flags.Parse(os.Args[1:]) // it exits
	if err := agent.Run(slog.New(slog.NewTextHandler(os.Stderr, nil))); err != nil {
		fmt.Fprintln(os.Stderr, "cniconf:", err)
		os.Exit(1)
	}
}
