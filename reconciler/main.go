// SPDX-License-Identifier: Apache-2.0

// Command ip-masq-reconciler keeps the masquerade rules of a node as its sources ask for, and answers
// questions about the node. It accepts the flags of ip-masq-agent and ip-masq-agent-v2.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/addresses"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
	"github.com/ip-masq/ip-masq-cni/pkg/podinfo"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// version is set by the linker.
var version = unstamped

const unstamped = "unknown"

// Exit codes.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
	exitDrift = 3 // or the node is not ready
)

// errDrift ends a command that has printed drift, or why the node is not ready.
var errDrift = errors.New("drift found")

type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// run runs a command. It looks for programs in the directories of path.
func run(args []string, path string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	a := &app{out: escaped{os.Stdout}, err: escaped{os.Stderr}, path: path}
	root := a.root()
	root.SetArgs(withTwoDashes(root, args))
	command, err := root.ExecuteContextC(ctx)
	var usage usageError
	isUsage := !a.parsed || errors.As(err, &usage)
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errDrift):
		return exitDrift
	case isUsage:
		fmt.Fprintf(a.err, "ip-masq-reconciler: %v\nSee %s --help.\n", err, command.CommandPath())
		return exitUsage
	}
	fmt.Fprintf(a.err, "ip-masq-reconciler: %v\n", err)
	return exitError
}

// app is what the commands have in common: the streams and the flags.
type app struct {
	out, err io.Writer
	path     string // of programs, as $PATH

	config  string         // --config
	flags   []*settingFlag // for the keys of reconciler.toml
	ignored []string       // klog's that were given
	output  string         // -o
	verbose int            // -v
	parsed  bool           // the command line is valid, as far as cobra knows
}

// escaped replaces control characters, which programs that answer in the reconciler's place could send to the
// terminal.
type escaped struct{ io.Writer }

func (w escaped) Write(p []byte) (int, error) {
	_, err := io.WriteString(w.Writer, strings.Map(replaceControl, string(p)))
	return len(p), err
}

func replaceControl(r rune) rune {
	if unicode.IsControl(r) && r != '\n' && r != '\t' {
		return unicode.ReplacementChar
	}
	return r
}

func (a *app) settingsFile() string { return cmp.Or(a.config, config.DefaultReconcilerFile) }

const (
	dataDirKey = "data_dir"
	confDirKey = "cni_conf_dir"
)

// inUse tells which directories the node uses already. An empty setting is unknown.
type inUse interface {
	dataDir(ctx context.Context) config.Setting
	confDir() config.Setting
}

// settings reads reconciler.toml and then the flags, which win; if the file is bad, the flags alone. The
// dataDir and the directory of conflists may be stated by plugin.toml, or be those in use.
func (a *app) settings(ctx context.Context, used inUse) (config.Settings, error) {
	s, err := a.settingsOver(config.DefaultSettings())
	file, _ := config.ReadPluginFile(config.DefaultPluginFile) // each sync reports the error
	dataDir, confDir := nodeDataDir(ctx, s, file, used), nodeConfDir(s, file, used)
	setOver(&s, dataDirKey, dataDir)
	setOver(&s, confDirKey, confDir)
	return s, err
}

// nodeDataDir returns the dataDir that replaces that of the settings: unless a flag states one, it is that of
// plugin.toml. While plugin.toml is bad, and where no file states a dataDir, it is the one in use.
func nodeDataDir(ctx context.Context, s config.Settings, file config.PluginFile, used inUse) config.Setting {
	origin := s.Origins[dataDirKey]
	switch {
	case origin == config.FlagOrigin:
		return config.Setting{}
	case file.Present && !file.Invalid:
		return config.Setting{Value: file.DataDir, Origin: file.Path}
	case file.Present || origin == "":
		return used.dataDir(ctx)
	}
	return config.Setting{}
}

// nodeConfDir returns the directory of conflists that replaces that of the settings: unless
// reconciler.toml or a flag states one, which each sync reports, it is that of plugin.toml. While
// plugin.toml is bad, it is the one in use.
func nodeConfDir(s config.Settings, file config.PluginFile, used inUse) config.Setting {
	isStated := s.Origins[confDirKey] != ""
	switch {
	case isStated || !file.Present:
		return config.Setting{}
	case file.Invalid:
		return used.confDir()
	}
	return config.Setting{Value: file.CNIConfDir, Origin: file.Path}
}

// setOver sets a key to a value that the settings do not state. An empty or bad value changes nothing.
func setOver(s *config.Settings, key string, value config.Setting) {
	if value.Value != "" && s.Set(key, value.Value) == nil {
		s.Origins[key] = value.Origin
	}
}

// owners knows which dataDir the comment of a chain or guard table names.
type owners struct{ drivers netfilter.Drivers }

func (o owners) dataDir(ctx context.Context) config.Setting {
	owned, _ := o.drivers.Owned(ctx) // an error is in the command's own report
	return dataDirOf(owned)
}

func (owners) confDir() config.Setting { return config.Setting{} }

// dataDirOf returns the dataDir that a chain names. The default wins: any program may add a chain.
func dataDirOf(owned []netfilter.OwnedChain) (named config.Setting) {
	for _, c := range owned {
		if c.Owner.DataDir == config.DefaultDataDir || named.Value == "" && c.Owner.DataDir != "" {
			named = config.Setting{Value: c.Owner.DataDir, Origin: "comment of " + c.String()}
		}
	}
	return named
}

func (a *app) settingsOver(s config.Settings) (config.Settings, error) {
	err := s.Read(a.settingsFile())
	isMissing := errors.Is(err, fs.ErrNotExist)
	if isMissing && a.config == "" {
		err = nil
	} else if isMissing {
		err = usageError{fmt.Errorf("--config: %w", err)}
	}
	flagsErr := a.setFlags(&s) // also over a bad file
	return s, cmp.Or(flagsErr, err)
}

func (a *app) setFlags(s *config.Settings) error {
	for _, f := range a.flags {
		if !f.given {
			continue
		}
		if err := s.Set(f.key, f.text); err != nil {
			return usageError{fmt.Errorf("--%s: %w", f.name, err)}
		}
	}
	return nil
}

// given reports whether a flag is given whose key begins with a prefix.
func (a *app) given(prefix string) bool {
	for _, f := range a.flags {
		if f.given && strings.HasPrefix(f.key, prefix) {
			return true
		}
	}
	return false
}

// node opens the node. With an error, its settings are not those of the file.
func (a *app) node(ctx context.Context) (*reconcile.Node, error) {
	all := netfilter.Drivers{iptables.New(a.path), nftables.New()} // as backend auto prefers them
	s, err := a.settings(ctx, owners{all})
	return open(s, all), err
}

func open(s config.Settings, all netfilter.Drivers) *reconcile.Node {
	node := reconcile.Open(s, config.DefaultPluginFile, all)
	node.Conntrack, node.Addresses = conntrack.Reset, addresses.Read
	node.CacheDir = podinfo.CacheDir
	if version != unstamped {
		node.Version = version
	}
	return node
}

func (a *app) json() bool { return a.output == "json" }

func (a *app) print(v any) error {
	e := json.NewEncoder(a.out)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

func warn[T any](a *app, warnings []T) {
	for _, w := range warnings {
		id := ""
		err, _ := any(w).(error)
		if of, is := errors.AsType[reconcile.FindingWarning](err); is {
			id = of.ID + ": "
		}
		fmt.Fprintf(a.err, "warning: %s%v\n", id, w)
	}
}

func (a *app) logger(s config.Settings) *slog.Logger {
	o := &slog.HandlerOptions{}
	if a.verbose >= 2 {
		o.Level = slog.LevelDebug
	}
	if s.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(a.err, o))
	}
	return slog.New(slog.NewTextHandler(a.err, o))
}

// remedied adds the remedy to the error of a file system that is mounted read-only.
func remedied(err error) error {
	if errors.Is(err, unix.EROFS) {
		const remedy = "let this program write there: in a container, mount it writable; " +
			"in a unit of systemd, add it to ReadWritePaths"
		return fmt.Errorf("%w; %s", err, remedy)
	}
	return err
}

func printEach[T any](w io.Writer, format string, items []T) {
	for _, item := range items {
		fmt.Fprintf(w, format+"\n", item)
	}
}

// mapped applies a function to each item. The result is not nil, so that JSON has [].
func mapped[T, U any](items []T, f func(T) U) []U {
	out := make([]U, len(items))
	for i, item := range items {
		out[i] = f(item)
	}
	return out
}
