// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ofCommand is the help of a command. The flags that all have would drown its
// own.
const ofCommand = `Usage:
  {{.UseLine}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}

Commands:{{range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding }} {{.Short}}{{end}}{{end}}{{end}}{{if .HasAvailableLocalFlags}}

Flags:
{{.LocalNonPersistentFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}

The settings of the node are flags too: see {{.Root.Name}} --help.
`

// helpCommand tells about the program or one of its commands.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [command]",
		Short: "Tell about the program, or about one command",
		RunE: func(c *cobra.Command, args []string) error {
			about, rest, err := c.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return usageError{fmt.Errorf("there is no command %s", policy.Quote(strings.Join(args, " ")))}
			}
			about.InitDefaultHelpFlag()
			about.InitDefaultVersionFlag()
			return about.Help()
		},
	}
}

// complete tells shells what can be written where.
func complete(root *cobra.Command) {
	values := map[string][]string{
		"backend": {"auto", "iptables", "nftables"}, "agent-dialect": {"v1", "v2"}, "log-format": {"text", "json"},
		"output": {"text", "json"}, "family": {"ipv4", "ipv6"},
	}
	directories := []string{"cni-conf-dir", "cni-bin-dir", "agent-config-dir", "data-dir"}
	for _, c := range append(root.Commands(), root) {
		if c.ValidArgsFunction == nil {
			c.ValidArgsFunction = cobra.NoFileCompletions
		}
		for name, list := range values {
			if c.Flags().Lookup(name) != nil || c.PersistentFlags().Lookup(name) != nil {
				// The error is that of a flag which is not there.
				_ = c.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(list, cobra.ShellCompDirectiveNoFileComp))
			}
		}
	}
	// Its own command would take a shell that it does not know for a wish for help,
	// and call an argument behind one that it knows no mistake in the command line.
	root.InitDefaultCompletionCmd()
	if c, _, err := root.Find([]string{"completion"}); err == nil {
		c.Args, c.RunE = noArguments, func(c *cobra.Command, _ []string) error { return c.Help() }
		for _, shell := range c.Commands() {
			shell.Args = noArguments
		}
	}
	for _, name := range directories {
		_ = root.MarkPersistentFlagDirname(name)
	}
}
