// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	_ "embed"
	"fmt"
	"regexp"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// root is the command line. Without a command it runs "run".
func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:               "ip-masq-reconciler",
		Short:             "Keep the masquerade rules of a node correct",
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
		Version:           version,
		RunE:              a.run,
		PersistentPreRun:  a.beforeCommand,
	}
	root.SetOut(a.out)
	root.SetErr(a.err)
	a.addFlags(root)
	root.AddCommand(a.commands()...)
	root.SetUsageFunc(writeUsage)
	for _, c := range append(root.Commands(), root) {
		c.ValidArgsFunction = cobra.NoFileCompletions
		if c.Args == nil && c.HasParent() { // cobra proposes commands for an argument of the root
			c.Args = cobra.NoArgs
		}
		_, text, _ := strings.Cut(help, "=== "+c.Name()+"\n")
		text, _, _ = strings.Cut(text, "\n\n===")
		c.Long, c.Example, _ = strings.Cut(strings.TrimSuffix(text, "\n"), "\n\nExamples:\n")
		if !c.HasParent() || c.Name() == "run" || c.Name() == "render" {
			continue
		}
		c.Flags().StringVarP(&a.output, "output", "o", "text", "`FORMAT` of the output: text or json")
		c.PreRunE = a.checkOutput
	}
	return root
}

// beforeCommand notes that the command line is valid, and warns of klog's flags.
func (a *app) beforeCommand(c *cobra.Command, _ []string) {
	a.parsed = true
	logsThem := !c.HasParent() || c.Name() == "run"
	if logsThem {
		return
	}
	for _, name := range a.ignored {
		warn(a, []string{"flag --" + name + " is accepted and does nothing: logs go to stderr"})
	}
}

func (a *app) checkOutput(*cobra.Command, []string) error {
	if a.output != "text" && a.output != "json" {
		return usageError{fmt.Errorf("-o %q: write text or json", a.output)}
	}
	return nil
}

// help has the texts of the commands and their examples, each after a line with its name.
//
//go:embed help.txt
var help string

func (a *app) commands() []*cobra.Command {
	return []*cobra.Command{
		{Use: "run", Short: "Keep the rules in sync until stopped (the default)", RunE: a.run},
		{Use: "once", Short: "Repair the rules once", RunE: a.once},
		{Use: "check", Short: "Compare the rules in the kernel with the sources", RunE: a.check},
		{Use: "status", Short: "Show on one screen whether the node is ready, and why not", RunE: a.status},
		a.renderCommand(),
		a.explainCommand(),
		a.whoCommand(),
		{Use: "doctor", Short: "Find what defeats the policy on this node", RunE: a.doctor},
		{Use: "cleanup", Short: "Remove the owned rules from every backend, and the state", RunE: a.cleanup},
		a.installCommand(),
		a.uninstallCommand(),
		{Use: "version", Short: "Print the version", RunE: a.version},
	}
}

func (a *app) version(*cobra.Command, []string) error {
	const platform = runtime.GOOS + "/" + runtime.GOARCH
	if a.json() {
		return a.print(map[string]string{"version": version, "go": runtime.Version(), "platform": platform})
	}
	fmt.Fprintf(a.out, "ip-masq-reconciler %s (%s, %s)\n", version, runtime.Version(), platform)
	return nil
}

// writeUsage writes the end of the help. That of a command leaves out the flags that all commands have. It is
// no template of cobra's: with package text/template the linker keeps each exported method, a sixth of the
// program.
func writeUsage(c *cobra.Command) error {
	w := c.OutOrStderr()
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
		const format = "\nFlags:\n%s\n\nThe flags that %s --help lists are accepted here too.\n"
		fmt.Fprintf(w, format, usages(c.LocalNonPersistentFlags()), c.Root().Name())
	} else {
		const format = "\nFlags:\n%s\n\nUse \"%s [command] --help\" for more information about a command.\n"
		fmt.Fprintf(w, format, usages(c.LocalFlags()), c.CommandPath())
	}
	return nil
}

func usages(flags *pflag.FlagSet) string {
	return strings.TrimRight(flags.FlagUsagesWrapped(100), " \n")
}

// settingFlag is the flag of a key of reconciler.toml. It keeps its text until the file is read.
type settingFlag struct {
	name, key   string
	placeholder string // of the value; "" for a boolean
	text        string // the default, then the given text
	given       bool
}

func (f *settingFlag) String() string { return f.text }

func (f *settingFlag) Type() string { return cmp.Or(f.placeholder, "bool") }

func (f *settingFlag) Set(text string) error {
	f.given, f.text = true, text
	s := config.DefaultSettings()
	return s.Set(f.key, text)
}

func (a *app) addFlags(root *cobra.Command) {
	flags := root.PersistentFlags()
	flags.SortFlags = false
	root.SetGlobalNormalizationFunc(withDashes)
	const isDefault = "`FILE` of settings (default: " + config.DefaultReconcilerFile + ", if it exists)"
	flags.StringVar(&a.config, "config", "", isDefault)
	defaults := config.DefaultSettings()
	for _, k := range defaults.Flags() {
		if k.Name != "agent.backend" { // --backend is its flag
			f := &settingFlag{flagName(k.Name), k.Name, k.Placeholder, k.Text(), false}
			a.flags = append(a.flags, f)
			added := flags.VarPF(f, f.name, "", k.Usage)
			if f.placeholder == "" {
				added.NoOptDefVal = "true"
			}
		}
	}
	flags.IntVarP(&a.verbose, "v", "v", 0, "verbosity `N` of the log: with 2 or more, every sync is logged")
	const booleans = "add-dir-header alsologtostderr legacy-stderr-threshold-behavior logtostderr " +
		"one-output skip-headers skip-log-headers"
	const others = "log-backtrace-at log-dir log-file log-file-max-size log-flush-frequency " +
		"stderrthreshold vmodule"
	const usage = "flag of klog, without effect"
	for name := range strings.FieldsSeq(booleans) {
		flags.BoolFunc(name, usage, a.ignore(name))
		flags.Lookup(name).Hidden = true
	}
	for name := range strings.FieldsSeq(others) {
		flags.Func(name, usage, a.ignore(name))
		flags.Lookup(name).Hidden = true
	}
}

// ignore returns what the flag of a name does when it is given: it is noted.
func (a *app) ignore(name string) func(string) error {
	return func(string) error {
		a.ignored = append(a.ignored, name)
		return nil
	}
}

// withDashes normalizes the name of a flag: klog has flags with underscores.
func withDashes(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
}

// flagName writes resync_interval, agent.masqChain and conflist.manage as --resync-interval,
// --masq-chain (as the agents have it) and --conflist-manage.
func flagName(key string) string {
	words := strings.NewReplacer("IPv6", "Ipv6", "CIDRs", "Cidrs", "_", "-", ".", "-")
	key = words.Replace(strings.TrimPrefix(key, "agent."))
	return strings.ToLower(regexp.MustCompile("[A-Z]").ReplaceAllString(key, "-$0"))
}

// withTwoDashes rewrites long flags with one dash, which the agents accept.
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
