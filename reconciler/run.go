// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/fswatch"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

func (a *app) runCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "run",
		Short: "Keep the rules right until stopped (the default)",
		Long: `Keeps the rules right: makes a pass at once, when rules or files change, and each
resync_interval. It ends with SIGTERM and leaves the rules as they are; SIGHUP makes it
read everything anew at once.

/livez and /healthz tell of the process, /readyz of the node, with what is wrong.`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return a.run(c.Context()) },
	}
}

// frugal is after what growth of the heap, in percent, it is collected: a
// process that is idle nearly always has time for that, and nodes are many.
const frugal = 50

// run keeps the node right until ctx ends. Settings that change are taken over;
// those that are bad are told of, and the last good ones hold.
func (a *app) run(ctx context.Context) error {
	debug.SetGCPercent(frugal)
	current, err := a.settings()
	var usage usageError
	if errors.As(err, &usage) {
		return err
	}
	k := &keeper{app: a, log: a.logger(current), drivers: drivers(forRepair), hangup: make(chan os.Signal, 1)}
	signal.Notify(k.hangup, syscall.SIGHUP)
	defer signal.Stop(k.hangup)
	a.warnOfInert(func(text string) { k.log.Warn(text) })
	k.monitor = metrics.New(metrics.Options{
		Version: version, State: k.view, ThirdParty: k.foreign, PluginVersion: k.plugin.version, Written: k.written,
		Log: k.log,
	})
	if k.files, err = watchFile(a.settingsFile()); err != nil {
		return err
	}
	defer func() { _ = k.files.Close() }()
	current, bad := a.settings() // again: from here on changes are noticed
	for ctx.Err() == nil {
		current, bad = k.keep(ctx, current, bad)
	}
	return nil
}

// watchFile watches the directory of a file, and those above it.
func watchFile(path string) (*fswatch.Watcher, error) {
	w, err := fswatch.New(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", path, err)
	}
	return w, nil
}

// keeper is what lasts while settings come and go.
type keeper struct {
	app     *app
	log     *slog.Logger
	monitor *metrics.Monitor
	drivers netfilter.Drivers
	hangup  chan os.Signal
	files   *fswatch.Watcher // of the settings

	plugin installed

	mu   sync.Mutex
	node *reconcile.Node
	loop *reconcile.Loop
	last *reconcile.Report
}

// keep keeps the node with these settings, and returns those to go on with.
func (k *keeper) keep(ctx context.Context, s config.Settings, bad error) (config.Settings, error) {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()

	k.log = k.app.logger(s)
	node := reconcile.Open(s, config.DefaultPluginFile, k.drivers)
	node.SettingsErr = bad
	manager := k.manage(s, node)
	loop := reconcile.NewLoop(node, k.log, func(r *reconcile.Report) { manager.passed(r); k.publish(node, r) })
	k.begin(node, loop)
	k.plugin.in(s.CNIBinDir)

	warn := func(err error) { k.log.Warn(err.Error()) }
	all.Go(func() { metrics.Serve(ctx, s.HealthListen, k.monitor.Health(), k.log) })
	all.Go(func() { metrics.Serve(ctx, s.MetricsListen, k.monitor.Metrics(), k.log) })
	all.Go(func() { listen(ctx, loop, warn) })
	if files, err := fswatch.NewFollowing(s.CNIConfDir, s.CNIBinDir, s.AgentConfigDir); err != nil {
		warn(fmt.Errorf("no events of files, the interval has to do: %w", err))
	} else {
		all.Go(func() { watch(ctx, loop, warn, files) })
	}
	if manager != nil {
		all.Go(func() { manager.run(ctx) })
	}
	all.Go(func() { loop.Run(ctx) })
	now := func() { loop.SyncNow(); manager.look() }
	return k.changed(ctx, now, s, bad)
}

// changed waits until the settings are others. When asked to look at once it does
// so, and calls now.
func (k *keeper) changed(ctx context.Context, now func(), s config.Settings, bad error) (config.Settings, error) {
	const (
		calm       = 100 * time.Millisecond // a file that is being written is empty first
		calmAtMost = time.Second            // should others write beside it all the time
		net        = time.Minute            // should an event be lost
	)
	var first time.Time // of the changes that were not looked at yet
	timer := time.NewTimer(net)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return s, bad
		case <-k.hangup:
			now()
			timer.Reset(0)
			continue
		case <-k.files.Changed():
			now := time.Now()
			if first.IsZero() {
				first = now
			}
			timer.Reset(min(calm, first.Add(calmAtMost).Sub(now)))
			continue
		case <-timer.C:
			first = time.Time{}
			timer.Reset(net)
		}
		next, err := k.app.settings()
		if err != nil {
			next = s // the last good ones
		}
		if !next.Equal(s) || text(err) != text(bad) {
			k.log.Info("the settings changed", "file", k.app.settingsFile())
			return next, err
		}
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
