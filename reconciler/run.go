// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist/install"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
	"github.com/ip-masq/ip-masq-cni/pkg/fswatch"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// run keeps the node in sync until the context ends, with the last good settings: bad ones are why it is not
// ready. Without good ones the flags and the defaults apply, because the process has to run to report the
// error.
func (a *app) run(c *cobra.Command, _ []string) error {
	const gcPercent = 30 // the process is idle nearly always: less memory for more CPU time
	debug.SetGCPercent(gcPercent)
	ctx := c.Context()
	node, err := a.node(ctx)
	_, isUsage := errors.AsType[usageError](err)
	isMissing := errors.Is(err, fs.ErrNotExist) // the file of --config, which may come later
	if isUsage && !isMissing {
		return err
	}
	settings := node.Settings
	d := &daemon{app: a, log: a.logger(settings), drivers: node.Drivers, hangup: make(chan os.Signal, 1)}
	signal.Notify(d.hangup, syscall.SIGHUP)
	defer signal.Stop(d.hangup)
	d.log.Info("starting", "version", version, settingsAttr(settings))
	for _, name := range a.ignored {
		d.log.Warn("ignored a flag of klog: logs go to stderr", "flag", "--"+name)
	}
	d.monitor = metrics.New(metrics.Options{
		Version: version, ThirdParty: d.thirdParty, PluginVersion: d.pluginVersion, Log: d.log,
		Conntrack: conntrack.ReadStats, Record: d.record, State: d.state, Written: d.written,
	})
	d.files = fswatch.New(filepath.Dir(a.settingsFile()))
	defer func() { _ = d.files.Close() }()
	// Again, because changes are noticed only from here on.
	settings, err = a.settings(ctx, settingsInUse{settings})
	for ctx.Err() == nil {
		settings, err = d.serve(ctx, settings, err)
	}
	d.log.Info("stopped", "reason", context.Cause(ctx).Error())
	return nil
}

// settingsInUse knows the directories of the settings so far, where the files that state them are gone or bad
// for a moment. Of a default it knows nothing.
type settingsInUse struct{ config.Settings }

func (s settingsInUse) dataDir(context.Context) config.Setting {
	return s.stated(dataDirKey, s.DataDir)
}

func (s settingsInUse) confDir() config.Setting { return s.stated(confDirKey, s.CNIConfDir) }

func (s settingsInUse) stated(key, value string) config.Setting {
	origin := s.Origins[key]
	if origin == "" {
		return config.Setting{}
	}
	return config.Setting{Value: value, Origin: origin}
}

// settingsAttr returns the settings with their origins. Policy keys are left out unless they are stated.
func settingsAttr(s config.Settings) slog.Attr {
	var values []any
	for _, x := range s.List() {
		isStated, isPolicy := x.Origin != config.DefaultOrigin, strings.HasPrefix(x.Key, "agent.")
		if isStated || !isPolicy {
			text := fmt.Sprintf("%s (%s)", policy.Printable(cmp.Or(x.Value, "none")), x.Origin)
			values = append(values, slog.String(x.Key, text))
		}
	}
	return slog.Group("settings", values...)
}

func (a *app) flagValues(s config.Settings) map[string]string {
	values := map[string]string{"config": a.settingsFile(), "v": strconv.Itoa(a.verbose)}
	settings := map[string]config.Setting{}
	for _, x := range s.List() {
		settings[x.Key] = x
	}
	for _, f := range a.flags {
		x := settings[f.key]
		values[f.name] = x.Value
		if x.Key == dataDirKey { // which the command line rarely states
			values[f.name] += " (" + x.Origin + ")"
		}
	}
	return values
}

// daemon is what stays when settings change.
type daemon struct {
	app     *app
	log     *slog.Logger
	monitor *metrics.Monitor
	drivers netfilter.Drivers
	hangup  chan os.Signal
	files   *fswatch.Watcher // of reconciler.toml

	current atomic.Pointer[reconcile.Loop]

	// The installed plugin when its version was last asked for.
	pluginFile       os.FileInfo
	installedVersion string
}

// serve runs everything with these settings until they change, and returns the next ones and their error.
func (d *daemon) serve(ctx context.Context, s config.Settings, bad error) (config.Settings, error) {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()

	d.log = d.app.logger(s)
	d.settingsAre(s, bad)
	node := open(s, d.drivers)
	node.SettingsErr = bad
	watched := nfnetlink.Watched{
		Tables: nftables.Tables(), Shared: iptables.Table, Chains: new(atomic.Pointer[[]string]),
	}
	loop := d.newLoop(node, watched)
	d.current.Store(loop)

	health, counts := d.monitor.Health(), d.monitor.Metrics()
	all.Go(func() { d.monitor.Serve(ctx, "health_listen", s.HealthListen, health, d.log) })
	all.Go(func() { d.monitor.Serve(ctx, "metrics_listen", s.MetricsListen, counts, d.log) })
	commits := func() error { return reportCommits(ctx, loop, watched) }
	all.Go(func() { d.watch(ctx, "nf_tables", commits) })
	addresses := func() error { return reportAddresses(ctx, loop) }
	all.Go(func() { d.watch(ctx, "addresses", addresses) })
	// The directories are watched before the loop reads them for the first time.
	dirs := []string{s.CNIConfDir, s.CNIBinDir, s.AgentConfigDir, filepath.Dir(config.DefaultPluginFile)}
	if s.Conflist.Manage {
		dirs = append(dirs, filepath.Dir(s.Conflist.EntryFile))
	}
	files, cache := fswatch.New(dirs...), fswatch.New(node.CacheDir)
	all.Go(func() { d.watchFiles(ctx, files, loop.FilesChanged) })
	all.Go(func() { d.watchCache(ctx, cache, loop) })
	all.Go(func() { loop.Run(ctx) })
	return d.waitForSettings(ctx, s, bad, loop.SyncNow)
}

// newLoop returns the loop of a node. The listener of commits watches the chains that the loop names.
func (d *daemon) newLoop(node *reconcile.Node, watched nfnetlink.Watched) *reconcile.Loop {
	report := func(r *reconcile.Report) { d.monitor.Report(r, node.Interval(r.Sources)) }
	loop := reconcile.NewLoop(node, d.log, report)
	loop.Active = func(ctx context.Context) { d.monitor.ServeSocket(ctx, node.Dir, d.log) }
	if node.Settings.Conflist.Manage {
		m := newManager(node.Settings, node, d.log)
		m.Ask = loop.CheckEntry
		loop.SyncConflist = m.Sync
	}
	loop.ConnectionsReset = d.monitor.ConnectionsReset
	loop.Watch = func(chains []netfilter.OwnedChain) { watched.Chains.Store(iptables.Watched(chains)) }
	loop.Verified = node.Publish
	return loop
}

func (d *daemon) settingsAre(s config.Settings, bad error) {
	d.monitor.Settings(metrics.Settings{Settings: s, Err: bad, Flags: d.app.flagValues(s)})
}

// waitForSettings returns the next settings and their error, when one of them changes.
func (d *daemon) waitForSettings(
	ctx context.Context, s config.Settings, bad error, syncNow func(),
) (config.Settings, error) {
	const quiet, maximum = 100 * time.Millisecond, time.Second // a file is empty while it is written
	changed := flowcontrol.Debounce{Quiet: quiet, Longest: maximum}
	for d.waitForFile(ctx, &changed, syncNow) {
		next, err := d.app.settings(ctx, settingsInUse{s})
		if err != nil {
			next = s
		}
		sameError := fmt.Sprint(err) == fmt.Sprint(bad) // the text is all that reports have of it
		if !next.Equal(s) {
			d.log.Info("settings changed", "file", d.app.settingsFile(), settingsAttr(next))
			return next, err
		}
		if !sameError {
			if err == nil { // else the next loop logs the error
				d.log.Info("settings are valid again", "file", d.app.settingsFile())
			}
			return next, err
		}
		d.settingsAre(next, err) // their lines may be others
	}
	return s, bad
}

// waitForFile returns true when the file of the settings is to be read: after a change, once it is quiet; at
// once after SIGHUP, which also calls syncNow; and every minute, as events can be lost. It returns false when
// the context ends.
func (d *daemon) waitForFile(ctx context.Context, changed *flowcontrol.Debounce, syncNow func()) bool {
	const poll = time.Minute
	nextPoll := time.Now().Add(poll)
	for {
		next := nextPoll
		if changed.Pending() {
			next = changed.Due()
		}
		select {
		case <-ctx.Done():
			return false
		case <-d.files.Changed():
			changed.Event(time.Now())
		case <-d.hangup: // a file that is being written is read again when it is quiet
			syncNow()
			return true
		case <-time.After(time.Until(next)):
			changed.Take(time.Now())
			return true
		}
	}
}

// watch calls listen, which returns when it fails, until the context ends. The failure says which events are
// missing.
func (d *daemon) watch(ctx context.Context, events string, listen func() error) {
	const retry = 10 * time.Second
	log := flowcontrol.LogOnce(d.log)
	for ctx.Err() == nil {
		err := listen()
		if ctx.Err() != nil || errors.Is(err, nfnetlink.ErrLost) { // after which it listens again at once
			continue
		}
		log.Warn("no events of "+events+": only the interval applies", "err", err)
		flowcontrol.Sleep(ctx, retry)
	}
}

func reportAddresses(ctx context.Context, loop *reconcile.Loop) error {
	return nfnetlink.ListenAddresses(ctx, policy.ServiceInterface, loop.AddressesChanged)
}

func reportCommits(ctx context.Context, loop *reconcile.Loop, watched nfnetlink.Watched) error {
	l, err := nfnetlink.Listen(watched)
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	// Commits before Listen were missed.
	loop.Committed(reconcile.Commit{Generation: l.Began, Touched: true})
	// The kernel names the program. Its pid is that of a thread, in the initial PID namespace, whose number
	// is PROC_PID_INIT_INO of the kernel.
	proc := "/proc"
	if namespace, _ := os.Readlink("/proc/self/ns/pid"); namespace != "pid:[4026531836]" {
		proc = ""
	}
	self, _ := os.ReadFile("/proc/self/comm") // without a name every commit is another program's
	for {
		c, err := l.Next()
		if err != nil {
			return err
		}
		var by reconcile.Writer
		if c.Program != strings.TrimSpace(string(self)) {
			by = writerOf(c, proc)
		}
		loop.Committed(reconcile.Commit{Generation: c.Generation, Touched: c.Touched, By: by})
	}
}

// watchCache watches the runtime's cache of network configurations, from which pods are recorded.
func (d *daemon) watchCache(ctx context.Context, cache *fswatch.Watcher, loop *reconcile.Loop) {
	events := loop.Node.CacheEvents()
	d.watchFiles(ctx, cache, func() {
		if events.Concern() {
			loop.FilesChanged()
		}
	})
}

func (d *daemon) watchFiles(ctx context.Context, files *fswatch.Watcher, changed func()) {
	defer func() { _ = files.Close() }()
	log := flowcontrol.LogOnce(d.log)
	for ctx.Err() == nil {
		// The watcher retries, and Changed delivers then too.
		if err := files.Err(); err != nil {
			log.Warn("no events of some files: only the interval applies to them", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-files.Changed():
			changed()
		}
	}
}

// record reads what is on record in the dataDir of the loop that runs.
func (d *daemon) record() (store.Record, error) {
	s, err := d.current.Load().Node.Dir.Load()
	return s.Record, err
}

func (d *daemon) state(ctx context.Context) *enforce.State { return d.current.Load().State(ctx) }

func (d *daemon) written(s policy.SourceID) (time.Time, error) {
	return d.current.Load().Node.Dir.Written(s)
}

func (d *daemon) thirdParty(r *reconcile.Report) (int, error) {
	return diagnose.CountThirdParty(diagnose.Host{
		Rules: r.Rules, State: r.State, ConfDir: r.Sources.ConfDir, DataDir: d.current.Load().Node.Dir.Path(),
	})
}

// pluginVersion returns what the installed plugin prints, or "". It runs a changed file only.
func (d *daemon) pluginVersion() string {
	path := filepath.Join(d.current.Load().Node.Settings.CNIBinDir, config.PluginType)
	before := d.pluginFile
	var err error
	d.pluginFile, err = os.Stat(path)
	if err != nil {
		return ""
	}
	if !isSameVersion(before, d.pluginFile) {
		d.installedVersion, _ = install.Version(context.Background(), path) // "" if it does not run
	}
	return d.installedVersion
}

// isSameVersion reports whether a file is as it was; nil is none.
func isSameVersion(before, now os.FileInfo) bool {
	if before == nil || !os.SameFile(before, now) {
		return false
	}
	return before.Size() == now.Size() && before.ModTime().Equal(now.ModTime())
}

// writerOf returns the program that made a commit. While it runs, proc has its parent. The kernel may have
// given the pid of one that has ended to another program, so the name is compared.
func writerOf(c nfnetlink.Commit, proc string) reconcile.Writer {
	w := reconcile.Writer{Process: reconcile.Process{PID: c.PID, Program: c.Program}}
	if proc == "" || !c.Touched || readProc(proc, c.PID, "comm") != c.Program {
		return w
	}
	_, parent, _ := strings.Cut(readProc(proc, c.PID, "status"), "\nPPid:")
	parent, _, _ = strings.Cut(parent, "\n")
	if pid, err := strconv.ParseUint(strings.TrimSpace(parent), 10, 32); err == nil && pid != 0 {
		w.Parent = reconcile.Process{PID: uint32(pid), Program: readProc(proc, uint32(pid), "comm")}
	}
	return w
}

func readProc(proc string, pid uint32, name string) string {
	text, _ := os.ReadFile(filepath.Join(proc, strconv.FormatUint(uint64(pid), 10), name))
	return strings.TrimSuffix(string(text), "\n")
}
