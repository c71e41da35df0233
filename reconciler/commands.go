// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// root is the command line. Without a command it runs "run".
func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "ip-masq-reconciler",
		Short: "Keep a node's masquerade rules as its sources ask for",
		Long: `Keep the masquerade rules of a node as its CNI conflists and the ip-masq-agent files ask
for. Without a command this is "run", which accepts the flags of ip-masq-agent and
ip-masq-agent-v2.

status, check, explain, doctor and render take the settings of the reconciler that runs on
this node; a flag replaces one of them, --config all.

Exit codes: 0 success, 1 error, 2 mistake in the command line, 3 drift found, or not ready.`,
		Example: `  # Show whether the node is ready, and what is in force
  ip-masq-reconciler status

  # Verify the rules
  ip-masq-reconciler check

  # Show the verdict for traffic to an address, and the source that decides it
  ip-masq-reconciler explain 10.1.2.3

  # Find what defeats the policy on this node
  ip-masq-reconciler doctor`,
		Version:           version,
		Args:              noArguments,
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
		RunE:              a.run,
		PersistentPreRun: func(c *cobra.Command, _ []string) {
			if c.HasParent() && c.Name() != "run" { // which logs them
				warn(a, mapped(a.ignored, func(name string) string {
					return "flag --" + name + " is accepted and does nothing: logs go to stderr"
				}))
			}
		},
	}
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.SetVersionTemplate(versionText() + "\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{flagError(err)} })
	root.SuggestionsMinimumDistance = 2
	root.SetHelpCommand(helpCommand())
	a.addFlags(root)
	root.AddCommand(a.commands()...)
	complete(root)
	for _, c := range root.Commands() {
		c.SetUsageTemplate(usageTemplate)
	}
	return root
}

// commands is the table of the commands.
func (a *app) commands() []*cobra.Command {
	return []*cobra.Command{
		{
			Use:   "run",
			Short: "Keep the rules in sync until stopped (the default)",
			Long: `Keep the rules in sync: at the start, when rules or files change, and after each
resync_interval. SIGTERM ends it and leaves the rules as they are; SIGHUP makes it read
everything again.

/livez and /healthz report on the process, /readyz on the node, with the reasons.`,
			Args: noArguments,
			RunE: a.run,
		},
		a.addOutput(&cobra.Command{
			Use:   "once",
			Short: "Sync once: read the sources and repair the rules",
			Long: `Read the conflists and agent files, apply their policy and repair the rules, once. Print
what was done. "run" may be active at the same time. The exit code is 1 if there are problems.`,
			Args: noArguments,
			RunE: a.once,
		}),
		a.addOutput(&cobra.Command{
			Use:   "check",
			Short: "Verify the rules without writing; exit code 3 for drift",
			Long: `Compare the rules in the kernel with what the conflists and agent files ask for, without
writing anything. Print each difference: what is missing, and what is unexpected. Run
"ip-masq-reconciler once" to repair them.

Exit codes: 0 the rules are right, 3 they differ, 1 error or a bad source.`,
			Args: noArguments,
			RunE: a.check,
		}),
		a.statusCommand(),
		a.renderCommand(),
		a.explainCommand(),
		a.addOutput(&cobra.Command{
			Use:   "doctor",
			Short: "Find what defeats the policy on this node",
			Long: `Find what defeats the policy on this node (a problem) or may surprise (a notice): masquerade
rules of other programs, pod networks that are not exempt, an agent that still runs, and
more. Print where each finding is and what to do. Nothing is written.

The exit code is 0, with and without findings.`,
			Args: noArguments,
			RunE: a.doctor,
		}),
		a.addOutput(&cobra.Command{
			Use:   "cleanup",
			Short: "Remove the owned rules from every backend, and the state",
			Long: `Remove the owned chains, sets and tables from every backend and family, and then the
dataDir. Running pods keep running, and their traffic is not masqueraded any more.

A conflist with the plugin entry restores the chain with the next pod: remove the entry
first, as "uninstall" does. Fails while "run" is active.`,
			Args: noArguments,
			RunE: a.cleanup,
		}),
		a.installCommand(),
		a.uninstallCommand(),
		a.addOutput(&cobra.Command{
			Use:   "version",
			Short: "Print the version",
			Args:  noArguments,
			RunE: func(*cobra.Command, []string) error {
				if a.json() {
					return a.print(map[string]string{"version": version, "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH})
				}
				fmt.Fprintln(a.out, versionText())
				return nil
			},
		}),
	}
}

func versionText() string {
	return fmt.Sprintf("ip-masq-reconciler %s (%s, %s/%s)", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// addOutput adds the flag -o to a command.
func (a *app) addOutput(c *cobra.Command) *cobra.Command {
	c.Flags().StringVarP(&a.output, "output", "o", "text", "`FORMAT` of the output: text or json")
	c.PreRunE = func(*cobra.Command, []string) error {
		if a.output != "text" && a.output != "json" {
			return usageError{fmt.Errorf("-o %q: write text or json", a.output)}
		}
		return nil
	}
	return c
}

// noArguments validates the arguments of a command that takes none.
func noArguments(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	word := policy.Quote(args[0])
	switch near := c.SuggestionsFor(args[0]); {
	case args[0] == "true" || args[0] == "false":
		return usageError{fmt.Errorf("%s takes no argument %s; write it behind the flag with =, as in --enable-ipv6=%s", c.CommandPath(), word, args[0])}
	case c.HasParent():
		return usageError{fmt.Errorf("%s takes no argument %s", c.CommandPath(), word)}
	case len(near) > 0:
		return usageError{fmt.Errorf("there is no command %s; did you mean %s?", word, near[0])}
	}
	return usageError{fmt.Errorf("there is no command %s", word)}
}

// usageTemplate is the help of a command without the flags that all commands have.
const usageTemplate = `Usage:
  {{.UseLine}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}

Commands:{{range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding }} {{.Short}}{{end}}{{end}}{{end}}{{if .HasAvailableLocalFlags}}

Flags:
{{.LocalNonPersistentFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}

The settings of the node are flags too: see {{.Root.Name}} --help.
`

func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [command]",
		Short: "Print the help of the program or of a command",
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

// complete adds the completions for shells.
func complete(root *cobra.Command) {
	for _, c := range append(root.Commands(), root) {
		if c.ValidArgsFunction == nil {
			c.ValidArgsFunction = cobra.NoFileCompletions
		}
	}
	// cobra's own command prints the help for an unknown shell, with exit code 0.
	root.InitDefaultCompletionCmd()
	if c, _, err := root.Find([]string{"completion"}); err == nil {
		c.Args, c.RunE = noArguments, func(c *cobra.Command, _ []string) error { return c.Help() }
		for _, shell := range c.Commands() {
			shell.Args = noArguments
		}
	}
}
