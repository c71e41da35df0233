// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// root is the command line. Without a command it runs "run".
func (a *app) root() *cobra.Command {
	var printVersion bool
	root := &cobra.Command{
		Use:   "ip-masq-reconciler",
		Short: "Keep the masquerade rules of a node correct",
		Long: `Keep the masquerade rules of a node equal to the policy in its CNI conflists and agent files.
Without a command this is "run", which accepts the flags of ip-masq-agent and ip-masq-agent-v2.

The settings are in /etc/ip-masq/reconciler.toml. Each key is a flag too, and flags win. status,
check, explain, doctor and render use the settings of the reconciler that runs on the node; a
flag replaces one of them, --config all of them.

Exit codes: 0 success; 1 error; 2 mistake in the command line; 3 the rules differ, or the node is
not ready.`,
		Example: `  # Show whether the node is ready, and the remedy if it is not
  ip-masq-reconciler status

  # Show the verdict for traffic to an address, and its origin
  ip-masq-reconciler explain 10.1.2.3

  # Find what defeats the policy on this node
  ip-masq-reconciler doctor

  # Repair the rules
  ip-masq-reconciler once`,
		Args:              noArguments,
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
		RunE: func(c *cobra.Command, args []string) error {
			if printVersion {
				fmt.Fprintln(a.out, versionText())
				return nil
			}
			return a.run(c, args)
		},
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
	root.Flags().BoolVar(&printVersion, "version", false, "version for ip-masq-reconciler")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{flagError(err)} })
	root.SuggestionsMinimumDistance = 2
	a.addFlags(root)
	root.AddCommand(a.commands()...)
	root.SetUsageFunc(writeUsage)
	for _, c := range append(root.Commands(), root) {
		c.ValidArgsFunction = cobra.NoFileCompletions
	}
	return root
}

// commands is the table of the commands.
func (a *app) commands() []*cobra.Command {
	return []*cobra.Command{
		{
			Use:   "run",
			Short: "Keep the rules in sync until stopped (the default)",
			Long: `Keep the rules as the conflists and agent files state them. Read and repair at the start, when
a file or a rule in nf_tables changes, and after each --resync-interval. A bad file does not end
the program: the last good policy stays in force, and the node is not ready. SIGHUP makes it
read everything again; SIGTERM ends it and leaves the rules as they are.

Exit codes: 0 stopped by a signal; 2 mistake in the command line.`,
			Example: `  # Run on a host with the agent files of /etc/config, and serve /metrics
  ip-masq-reconciler run --agent-config-dir /etc/config --metrics-listen :19821

  # Keep the plugin entry in the conflist, too
  ip-masq-reconciler run --conflist-manage --conflist-entry-file /etc/ip-masq/entry.json

  # Log every sync, as JSON
  ip-masq-reconciler run --v 2 --log-format json`,
			Args: noArguments,
			RunE: a.run,
		},
		a.addOutput(&cobra.Command{
			Use:   "once",
			Short: "Repair the rules once",
			Long: `Read the conflists and agent files, apply their policy and repair the rules, once. Print what
was done. "run" may be active at the same time. The settings are those of reconciler.toml and
of the flags; without --agent-config-dir, the stored policy of the agent files stays.

Exit codes: 0 the node is ready; 1 a problem remains, or error; 2 mistake in the command line.`,
			Example: `  # Repair the rules now
  ip-masq-reconciler once

  # Apply changed agent files
  ip-masq-reconciler once --agent-config-dir /etc/config

  # Repair the rules if they differ, and print the result as JSON
  ip-masq-reconciler check || ip-masq-reconciler once -o json`,
			Args: noArguments,
			RunE: a.once,
		}),
		a.addOutput(&cobra.Command{
			Use:   "check",
			Short: "Compare the rules in the kernel with the sources",
			Long: `Compare the rules in the kernel with the policy of the conflists and agent files. Print each
difference: what is missing, and what is unexpected. Nothing is written; "once" repairs the
rules.

Exit codes: 0 the rules are correct; 1 the node has another fault, or error; 2 mistake in the
command line; 3 the rules differ, or ip-masq's own conflist is stale.`,
			Example: `  # Verify the rules of this node
  ip-masq-reconciler check

  # Compare the rules of ip-masq-agent with those that its files ask for
  ip-masq-reconciler check --agent-config-dir /etc/config

  # Print the differences as JSON
  ip-masq-reconciler check -o json`,
			Args: noArguments,
			RunE: a.check,
		}),
		a.statusCommand(),
		a.renderCommand(),
		a.explainCommand(),
		a.whoCommand(),
		a.addOutput(&cobra.Command{
			Use:   "doctor",
			Short: "Find what defeats the policy on this node",
			Long: `Find what defeats the policy on this node (a problem), and what may surprise (a notice). Examples
are masquerade rules of other programs, pod networks that are not exempt, and an agent that still
runs. Print where each finding is, and its remedy. Nothing is written.

Exit codes: 0 with and without findings; 1 error; 2 mistake in the command line.`,
			Example: `  # Find problems on this node
  ip-masq-reconciler doctor

  # Look for conflists where k3s has them
  ip-masq-reconciler doctor --cni-conf-dir /var/lib/rancher/k3s/agent/etc/cni/net.d

  # Print the findings as JSON
  ip-masq-reconciler doctor -o json`,
			Args: noArguments,
			RunE: a.doctor,
		}),
		a.addOutput(&cobra.Command{
			Use:   "cleanup",
			Short: "Remove the owned rules from every backend, and the state",
			Long: `Remove the owned chains, sets and tables from every backend and family, and then the dataDir.
Running pods keep running, and their traffic is not masqueraded any more. A conflist with the
plugin entry restores the rules with the next pod: remove the entry first, as "uninstall" does.

Exit codes: 0 removed, or nothing to remove; 1 error, or "run" is active; 2 mistake in the command
line.`,
			Example: `  # Remove rules and state after the service has stopped
  systemctl stop ip-masq-reconciler && ip-masq-reconciler cleanup

  # Remove the rules of a test with a dataDir of its own
  ip-masq-reconciler cleanup --data-dir /tmp/ip-masq

  # Print what was removed as JSON
  ip-masq-reconciler cleanup -o json`,
			Args: noArguments,
			RunE: a.cleanup,
		}),
		a.installCommand(),
		a.uninstallCommand(),
		a.addOutput(&cobra.Command{
			Use:   "version",
			Short: "Print the version",
			Long: `Print the version of this program. The plugin prints its own when it is run without arguments.

Exit codes: 0 printed; 1 error; 2 mistake in the command line.`,
			Example: `  # Print the version of this program
  ip-masq-reconciler version

  # Compare it with the version of the plugin
  ip-masq-reconciler version; /opt/cni/bin/ip-masq

  # Print the version as JSON
  ip-masq-reconciler version -o json`,
			Args: noArguments,
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

// oneArgument validates the arguments of a command that takes one.
func oneArgument(what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usageError{fmt.Errorf("%s takes one %s, and has %d", c.Name(), what, len(args))}
		}
		return nil
	}
}

// writeUsage writes the end of the help. That of a command leaves out the flags that all commands have. It is no template of
// cobra's: with package text/template the linker keeps each exported method, a sixth of the program.
func writeUsage(c *cobra.Command) error {
	w := c.OutOrStderr()
	list := func(flags *pflag.FlagSet) string { return strings.TrimRight(flags.FlagUsagesWrapped(100), " \n") }
	fmt.Fprintf(w, "Usage:\n  %s\n", c.UseLine())
	if c.HasAvailableSubCommands() {
		fmt.Fprintf(w, "  %s [command]\n", c.CommandPath())
	}
	if c.HasExample() {
		fmt.Fprintf(w, "\nExamples:\n%s\n", c.Example)
	}
	if c.HasAvailableSubCommands() {
		fmt.Fprintf(w, "\nAvailable Commands:\n")
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() {
				fmt.Fprintf(w, "  %-*s %s\n", sub.NamePadding(), sub.Name(), sub.Short)
			}
		}
	}
	if c.HasParent() {
		fmt.Fprintf(w, "\nFlags:\n%s\n\nThe flags that %s --help lists are accepted here too.\n", list(c.LocalNonPersistentFlags()), c.Root().Name())
	} else {
		fmt.Fprintf(w, "\nFlags:\n%s\n\nUse \"%s [command] --help\" for more information about a command.\n", list(c.LocalFlags()), c.CommandPath())
	}
	return nil
}

// settingFlag is the flag of a key of reconciler.toml. It keeps its text until the file is read.
type settingFlag struct {
	name, key   string
	placeholder string // of the value; "" for a boolean
	text        string // the default, then the given text
	given       bool
}

// String implements pflag.Value.
func (f *settingFlag) String() string { return f.text }

// Type implements pflag.Value.
func (f *settingFlag) Type() string {
	return cmp.Or(f.placeholder, "bool")
}

// Set implements pflag.Value. A bad value is a mistake in the command line.
func (f *settingFlag) Set(text string) error {
	f.given, f.text = true, text
	s := config.DefaultSettings()
	return flagMistake(s.Set(f.key, text))
}

// flagMistake rewords an error about a key for its flag, whose name the caller adds.
func flagMistake(err error) error {
	var mistake *policy.FieldError
	if !errors.As(err, &mistake) {
		return err
	}
	text := strings.ReplaceAll(mistake.Problem, "leave the key out", "leave the flag out")
	if mistake.Value != "" {
		text = policy.Quote(mistake.Value) + " " + text
	}
	return errors.New(text)
}

// flagError rewords an error of pflag.
func flagError(err error) error {
	var value *pflag.InvalidValueError
	var unknown *pflag.NotExistError
	switch {
	case errors.As(err, &value):
		return fmt.Errorf("--%s: %w", value.GetFlag().Name, errors.Unwrap(value))
	case errors.As(err, &unknown):
		return fmt.Errorf("there is no flag %s", policy.Quote(unknown.GetSpecifiedName()))
	}
	return err
}

func (a *app) addFlags(root *cobra.Command) {
	flags := root.PersistentFlags()
	flags.SortFlags = false
	// klog has flags with underscores.
	root.SetGlobalNormalizationFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
	flags.StringVar(&a.config, "config", "", "`FILE` of settings (default: "+config.DefaultReconcilerFile+", if it exists)")
	defaults := config.DefaultSettings()
	for _, k := range defaults.Flags() {
		if k.Name != "agent.backend" { // --backend is its flag
			f := &settingFlag{flagName(k.Name), k.Name, k.Placeholder, k.Text(), false}
			a.flags = append(a.flags, f)
			if added := flags.VarPF(f, f.name, "", k.Usage); f.placeholder == "" {
				added.NoOptDefVal = "true"
			}
		}
	}
	flags.IntVarP(&a.verbose, "v", "v", 0, "verbosity `N` of the log: with 2 or more, every sync is logged")
	const booleans = "add-dir-header alsologtostderr legacy-stderr-threshold-behavior logtostderr one-output skip-headers skip-log-headers"
	const others = "log-backtrace-at log-dir log-file log-file-max-size log-flush-frequency stderrthreshold vmodule"
	for name := range strings.FieldsSeq(booleans + " " + others) {
		define := flags.Func
		if strings.Contains(booleans, name) {
			define = flags.BoolFunc
		}
		define(name, "flag of klog, without effect", func(string) error {
			a.ignored = append(a.ignored, name)
			return nil
		})
		flags.Lookup(name).Hidden = true
	}
}

// flagName writes resync_interval, agent.masqChain and conflist.manage as --resync-interval,
// --masq-chain (as the agents have it) and --conflist-manage.
func flagName(key string) string {
	key = strings.NewReplacer("IPv6", "Ipv6", "CIDRs", "Cidrs", "_", "-", ".", "-").Replace(strings.TrimPrefix(key, "agent."))
	return strings.ToLower(regexp.MustCompile("[A-Z]").ReplaceAllString(key, "-$0"))
}

// withTwoDashes rewrites long flags with one dash, which Go's flag package and so the agents
// accept.
func withTwoDashes(root *cobra.Command, args []string) []string {
	out := make([]string, 0, len(args))
	for i, arg := range args {
		if arg == "--" {
			return append(out, args[i:]...)
		}
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "-"), "=")
		oneDash := strings.HasPrefix(arg, "-") && !strings.HasPrefix(arg, "--")
		if oneDash && len(name) > 1 && root.PersistentFlags().Lookup(name) != nil {
			arg = "-" + arg
		}
		out = append(out, arg)
	}
	return out
}
