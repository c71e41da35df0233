// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// settingFlag is a flag for a key of reconciler.toml. It keeps the text, as the
// file is to be read before it.
type settingFlag struct {
	name, key string
	boolean   bool
	text      string // the default, and then what was given
	given     bool
}

// String implements pflag.Value.
func (f *settingFlag) String() string { return f.text }

// Type implements pflag.Value.
func (f *settingFlag) Type() string {
	if f.boolean {
		return "bool"
	}
	return "string"
}

// Set implements pflag.Value. A bad value is a mistake in the command line.
func (f *settingFlag) Set(text string) error {
	s := config.DefaultSettings()
	f.text, f.given = text, true
	return f.apply(&s)
}

func (f *settingFlag) apply(s *config.Settings) error {
	return asFlag(s.Set(f.key, f.text))
}

// asFlag makes a mistake in the value of a key one in that of a flag, which says
// its name itself.
func asFlag(err error) error {
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

// flagError says what is wrong with a flag in the words of the one that reads it.
func flagError(err error) error {
	var value *pflag.InvalidValueError
	var unknown *pflag.NotExistError
	switch {
	case errors.As(err, &value) && value.GetFlag().Value.Type() == "int":
		return fmt.Errorf("--%s: %s is not a whole number; write one", value.GetFlag().Name, policy.Quote(value.GetValue()))
	case errors.As(err, &value):
		return fmt.Errorf("--%s: %w", value.GetFlag().Name, errors.Unwrap(value))
	case errors.As(err, &unknown):
		return fmt.Errorf("there is no flag %s", policy.Quote(unknown.GetSpecifiedName()))
	}
	return err
}

// inertFlag is one of klog's that means nothing here. An agent's DaemonSet has
// to start all the same.
type inertFlag struct {
	name  string
	given bool
}

// String implements pflag.Value.
func (f *inertFlag) String() string { return "" }

// Type implements pflag.Value.
func (f *inertFlag) Type() string { return "string" }

// Set implements pflag.Value.
func (f *inertFlag) Set(string) error {
	f.given = true
	return nil
}

// warnOfInert warns of each flag that was given and means nothing here.
func (a *app) warnOfInert(warn func(text string)) {
	for _, f := range a.inert {
		if f.given {
			warn("flag --" + f.name + " is accepted and does nothing: logs go to stderr")
		}
	}
}

func (a *app) addFlags(root *cobra.Command) {
	flags := root.PersistentFlags()
	flags.SortFlags = false
	// The agents' klog writes some of its flags with underscores.
	root.SetGlobalNormalizationFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
	flags.StringVar(&a.config, "config", "", "read this `FILE` (default "+config.DefaultReconcilerFile+", if it is there)")
	defaults := config.DefaultSettings()
	for _, field := range defaults.Fields() {
		if field.Key == "agent.backend" {
			continue // --backend says it already
		}
		f := &settingFlag{name: flagName(field.Key), key: field.Key, boolean: field.Bool, text: field.Value}
		a.flags = append(a.flags, f)
		added := flags.VarPF(f, f.name, "", field.Usage)
		if f.boolean {
			added.NoOptDefVal = "true"
		}
	}
	flags.IntVarP(&a.verbose, "v", "v", 0, "verbosity `N` of the log: 2 and more tell of each pass")
	for _, k := range klogFlags() {
		f := &inertFlag{name: k.name}
		a.inert = append(a.inert, f)
		added := flags.VarPF(f, k.name, "", "accepted for ip-masq-agent's sake; does nothing")
		added.Hidden = true
		if k.boolean {
			added.NoOptDefVal = "true"
		}
	}
}

// flagName writes resync_interval, agent.masqChain and conflist.manage as
// --resync-interval, --masq-chain (as the agents have it) and --conflist-manage.
func flagName(key string) string {
	key = strings.TrimPrefix(key, "agent.")
	key = strings.NewReplacer("IPv6", "Ipv6", "CIDRs", "Cidrs").Replace(key)
	var b strings.Builder
	for i, r := range key {
		switch {
		case unicode.IsUpper(r):
			if i > 0 {
				b.WriteByte('-')
			}
			b.WriteRune(unicode.ToLower(r))
		case r == '_' || r == '.':
			b.WriteByte('-')
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

type klogFlag struct {
	name    string
	boolean bool
}

func klogFlags() []klogFlag {
	return []klogFlag{
		{"add-dir-header", true}, {"alsologtostderr", true}, {"legacy-stderr-threshold-behavior", true},
		{"log-backtrace-at", false}, {"log-dir", false}, {"log-file", false}, {"log-file-max-size", false},
		{"log-flush-frequency", false}, {"logtostderr", true}, {"one-output", true}, {"skip-headers", true},
		{"skip-log-headers", true}, {"stderrthreshold", false}, {"vmodule", false},
	}
}

// withTwoDashes rewrites long flags that are written with one dash, as Go's own
// flag package and so the agents take them.
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
