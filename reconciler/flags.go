// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

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
