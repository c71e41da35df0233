// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// app is one run of the program.
type app struct {
	out, err io.Writer

	config  string // the file that --config names
	flags   []*settingFlag
	inert   []*inertFlag
	output  string // of -o
	verbose int
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "ip-masq-reconciler",
		Short: "Keep a node's masquerade rules right, and answer questions about them",
		Long: `ip-masq-reconciler keeps the masquerade rules of a node as its CNI conflists and
the ip-masq-agent files ask for. Without a command it does what "run" does, with
the flags of ip-masq-agent and ip-masq-agent-v2 as they are.

Exit codes: 0 all is well, 1 error, 2 mistake in the command line, 3 drift found.`,
		Example: `  ip-masq-reconciler check                  # are the rules right?
  ip-masq-reconciler explain 10.1.2.3       # what happens to traffic to there, and who said so
  ip-masq-reconciler doctor                 # what on this node will defeat the policy`,
		Version:           version,
		Args:              noArguments,
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
		RunE:              func(c *cobra.Command, _ []string) error { return a.run(c.Context()) },
		PersistentPreRun: func(c *cobra.Command, _ []string) {
			if c.HasParent() && c.Name() != "run" { // which has a log for them
				a.warnOfInert(func(text string) { fmt.Fprintln(a.err, "warning:", text) })
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
	root.AddCommand(a.runCommand(), a.onceCommand(), a.checkCommand(), a.renderCommand(),
		a.explainCommand(), a.doctorCommand(), a.cleanupCommand(), a.installCommand(), a.uninstallCommand(),
		a.versionCommand())
	complete(root)
	for _, c := range root.Commands() {
		c.SetUsageTemplate(ofCommand)
	}
	return root
}

// noArguments is for commands that take none.
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

// settingsFile is the path of reconciler.toml.
func (a *app) settingsFile() string {
	if a.config == "" {
		return config.DefaultReconcilerFile
	}
	return a.config
}

// settings reads the file and then the flags, which win. Where the file is bad
// the settings are those of the flags alone, beside the error.
func (a *app) settings() (config.Settings, error) {
	return a.settingsOver(config.DefaultSettings())
}

// settingsOver reads them over others, which hold where nothing is stated.
func (a *app) settingsOver(s config.Settings) (config.Settings, error) {
	err := s.Read(a.settingsFile())
	if errors.Is(err, fs.ErrNotExist) && a.config == "" {
		err = nil
	}
	for _, f := range a.flags {
		if !f.given {
			continue
		}
		if err := f.apply(&s); err != nil {
			return s, usageError{fmt.Errorf("--%s: %w", f.name, err)}
		}
		if f.key == "resync_interval" && s.Agent == nil {
			// Of the agents' flags this one alone is no key of [agent].
			s.Agent = new(config.AgentPolicy)
		}
	}
	return s, err
}

// node returns the node for a command that answers once: it wants sound
// settings.
func (a *app) node() (*reconcile.Node, error) {
	s, err := a.settings()
	if err != nil {
		return nil, err
	}
	return reconcile.Open(s, config.DefaultPluginFile, drivers(forPeople)), nil
}

// purpose is what rules are read for: to show them to people as their tools do,
// or to repair them without delay.
type purpose bool

const (
	forPeople purpose = false
	forRepair purpose = true
)

// drivers are the backends, in the order in which auto prefers them.
func drivers(p purpose) netfilter.Drivers {
	return netfilter.Drivers{iptables.New(iptables.Options{KernelForm: p == forRepair}), nftables.New()}
}
