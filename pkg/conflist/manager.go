// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// Most programs write a file in more than one step.
	quietTime    = 50 * time.Millisecond
	maxQuietTime = 250 * time.Millisecond
	// A failure is retried after minRetry, then after twice the time each, up to maxRetry, or to
	// maxRaceRetry if another program keeps changing the file.
	minRetry     = 100 * time.Millisecond
	maxRetry     = 30 * time.Second
	maxRaceRetry = time.Second
	// An entry that lives no longer is removed by a program that watches the file.
	briefLife = 5 * time.Second
)

// Options configure a Manager.
type Options struct {
	Editor                           // whose Entry is what ReadEntry returns
	ReadEntry func() ([]byte, error) // returns the entry to insert
	BinDir    string                 // the directory from which runtimes run the plugin

	// Changed delivers when something may have changed in Dir or BinDir, or in a file that ReadEntry
	// and Check read.
	Changed <-chan struct{}
	// Interval is the longest time between two syncs: events can be lost.
	Interval time.Duration
	// Leader reports whether this process is the one to write.
	Leader func() bool

	Log *slog.Logger
	// Report is called after each sync.
	Report func(Status)
}

// Status is the result of a sync.
type Status struct {
	Leader   bool // if not, the rest is zero
	Present  bool // the network has the plugin entry
	Flapping bool // another program removes it repeatedly
	Wrote    bool // this sync inserted it
	Problems []Problem
}

// Problem is a reason why the node is not ready.
type Problem struct {
	Err     error
	Waiting bool   // for something that is expected to come by itself
	Reason  string // conflist, or plugin for its binary; as /readyz says

	key string // of problems whose text varies
}

// Manager keeps the plugin entry in the conflist of a network: it inserts the entry as soon as there
// is a network, and again whenever it is removed. If that happens repeatedly, it names the program
// that most likely does it, and backs off. It removes nothing.
type Manager struct {
	options  Options
	wake     chan struct{}
	debounce *flowcontrol.Debouncer
	log      *slog.Logger // which logs a warning once
	logged   flowcontrol.Conditions

	network  Network
	removals removals

	failure  error // of the last attempt
	failures int   // in a row
	retryAt  time.Time
}

// NewManager returns a Manager that Run starts.
func NewManager(o Options) *Manager {
	return &Manager{
		options: o, wake: make(chan struct{}, 1), log: flowcontrol.LogOnce(o.Log),
		debounce: flowcontrol.NewDebouncer(quietTime, maxQuietTime), removals: newRemovals(),
	}
}

// removals are those of the plugin entry by other programs. The first repairs after quick removals
// come at once: a main CNI plugin that is being installed rewrites its file some dozen times. After
// late removals, those of an entry that lived longer than briefLife, it would not help to wait.
type removals struct {
	quickRemovals, lateRemovals flowcontrol.Flapping[string]
	present                     time.Time // since when the entry is there; zero if it is not
	last                        time.Time // when it was removed last
	restored                    time.Time // when it was last inserted again
}

const removalWindow = 10 * time.Minute

func newRemovals() removals {
	return removals{
		quickRemovals: flowcontrol.Flapping[string]{Threshold: 10, Immediate: 50, Window: removalWindow, ResetAfter: 10 * time.Second},
		lateRemovals:  flowcontrol.Flapping[string]{Threshold: 5, Immediate: math.MaxInt, Window: removalWindow, ResetAfter: 5 * time.Minute},
	}
}

// observe takes note of whether the entry is there.
func (r *removals) observe(present bool, now time.Time) {
	const what = "plugin entry"
	switch {
	case present && r.present.IsZero():
		r.present = now
	case !present && !r.present.IsZero():
		if now.Sub(r.present) < briefLife {
			r.quickRemovals.Reverted(now, what)
		} else {
			r.lateRemovals.Reverted(now, what)
		}
		r.present, r.last = time.Time{}, now
	}
}

// insertAt is when the entry may be inserted again.
func (r *removals) insertAt() time.Time { return r.last.Add(r.quickRemovals.Pause()) }

// SyncNow asks for a sync at once, as when Leader has changed. Any goroutine may call it; it never
// waits.
func (m *Manager) SyncNow() {
	select {
	case m.wake <- struct{}{}:
	default: // asked already
	}
}

// Run keeps the entry until ctx ends, and then leaves it in place.
func (m *Manager) Run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.options.Changed:
			m.debounce.Event()
			continue
		case <-m.debounce.C:
		case <-m.wake:
		case <-timer.C:
		}
		s := m.sync(ctx)
		if ctx.Err() != nil {
			return
		}
		m.logProblems(s)
		m.options.Report(s)
		timer.Reset(m.next(s))
	}
}

// next returns the time until the next sync if nothing changes.
func (m *Manager) next(s Status) time.Duration {
	now, wait := time.Now(), m.options.Interval
	if s.Leader {
		for _, at := range []time.Time{m.removals.insertAt(), m.retryAt, m.removals.quickRemovals.Ends().Add(1), m.removals.lateRemovals.Ends().Add(1)} {
			if at.After(now) {
				wait = min(wait, at.Sub(now))
			}
		}
	}
	return wait
}

func (m *Manager) sync(ctx context.Context) Status {
	if !m.options.Leader() {
		m.removals = newRemovals()
		m.noteAttempt(nil)
		return Status{}
	}
	now := time.Now()
	n, err := Find(m.options.Dir, m.options.Network)
	s := Status{Leader: true}
	// Read after the conflist: an entry that is missing now is replaced by the present one.
	if entry, err := m.options.ReadEntry(); err == nil {
		m.options.Entry = entry
	} else {
		which := "the last good one"
		if m.options.Entry == nil {
			which = "none"
		}
		s.add(Problem{Err: fmt.Errorf("the plugin entry: %w; until then %s is inserted", err, which)})
	}
	if err == nil {
		m.network, s.Present = n, n.Entries > 0
	}
	if err == nil || errors.Is(err, ErrNoNetworks) || errors.Is(err, ErrNetworkNotFound) {
		m.removals.observe(s.Present, now)
	}
	missing := config.CheckPlugin(m.options.BinDir)
	switch {
	case err != nil:
	case n.Entries == 1 && !n.Generated:
		m.noteAttempt(nil)
	case now.Before(m.retryAt):
		err = m.failure
	case m.options.Entry != nil && missing == nil && !now.Before(m.removals.insertAt()):
		err = m.insert(ctx, &s, n)
	}
	s.Flapping = m.removals.quickRemovals.Active(now) != "" || m.removals.lateRemovals.Active(now) != ""
	m.addProblems(&s, n, err, missing)
	return s
}

// insert inserts the entry.
func (m *Manager) insert(ctx context.Context, s *Status, n Network) error {
	c, err := m.options.Insert(ctx)
	now := time.Now()
	m.noteAttempt(err)
	if err != nil {
		s.Present = s.Present && !isContentError(err)
		return err
	}
	m.removals.observe(true, now)
	s.Present, s.Wrote = true, c.Wrote
	if !c.Wrote {
		return nil
	}
	text, level := "inserted the plugin entry", slog.LevelInfo
	switch {
	case n.Entries > 1:
		text = "removed duplicate plugin entries"
	case n.Entries == 1:
		text = "updated the generated conflist"
	case !m.removals.last.IsZero():
		text = "restored the plugin entry"
		if now.Sub(m.removals.restored) < removalWindow {
			level = slog.LevelDebug // flapping is logged once
		}
		m.removals.restored = now
	}
	args := []any{"file", policy.Printable(c.Path), "network", policy.Printable(c.Network)}
	if n.Multus != nil {
		args = append(args, "multus", policy.Printable(n.Multus.Path))
	}
	if c.Backup != "" {
		args = append(args, "backup", policy.Printable(c.Backup))
	}
	m.options.Log.Log(ctx, level, text, args...)
	if c.BackupErr != nil {
		m.log.Warn("no backup of the conflist was kept", "err", c.BackupErr.Error())
	}
	return nil
}

// noteAttempt decides when to try again; err is nil after a success.
func (m *Manager) noteAttempt(err error) {
	if err == nil || isContentError(err) { // only another program can change that: then there is an event
		m.failure, m.failures, m.retryAt = nil, 0, time.Time{}
		return
	}
	longest := maxRetry
	if errors.Is(err, errChanged) {
		longest = maxRaceRetry
	}
	m.failure, m.retryAt = err, time.Now().Add(min(minRetry<<min(m.failures, 16), longest))
	m.failures++
}

// isContentError reports whether an error is about what the files say, not about writing them.
func isContentError(err error) bool {
	known := []error{ErrNoNetworks, ErrNetworkNotFound, ErrBroken, ErrElsewhere, ErrOnlyPlugin, ErrDelegate, config.ErrPosition}
	return slices.ContainsFunc(known, func(k error) bool { return errors.Is(err, k) })
}

func (s *Status) add(p Problem) {
	p.Reason = cmp.Or(p.Reason, "conflist")
	s.Problems = append(s.Problems, p)
}

// addProblems adds the problems. An entry that is there and keeps pods from starting is reported by
// the reconcile loop, with or without a Manager.
func (m *Manager) addProblems(s *Status, n Network, err, missing error) {
	dir := policy.Printable(m.options.Dir)
	if missing != nil && !s.Present {
		s.add(Problem{Reason: "plugin", Err: fmt.Errorf("%w, so no plugin entry is inserted into the conflist, and no pod would start with it: "+
			`run "ip-masq-reconciler install", or in Kubernetes delete this node's pod of ip-masq, whose init container does; or name another directory with --cni-bin-dir`, missing)})
	}
	if err := n.Multus.Err(n.Name); err != nil && s.Present {
		s.add(Problem{Err: err, Waiting: n.Multus.Depth == 1})
	}
	switch {
	case err == nil, errors.Is(err, config.ErrPosition):
	case errors.Is(err, ErrNoNetworks), errors.Is(err, ErrNetworkNotFound):
		what, remedy := "the main CNI plugin's network", "set cni_conf_dir if it is elsewhere"
		if m.options.Network != "" {
			what += " " + policy.Printable(m.options.Network)
		}
		if errors.Is(err, ErrNetworkNotFound) {
			remedy = err.Error()
		}
		if names := renamedByCilium(m.options.Dir); len(names) > 0 {
			remedy = fmt.Sprintf("Cilium has renamed %s: %s", policy.Printable(strings.Join(names, ", ")), knownWriters()[0].remedy)
		}
		s.add(Problem{Err: fmt.Errorf("waiting for %s in %s; %s", what, dir, remedy), Waiting: true})
	case isContentError(err):
		s.add(Problem{Err: err})
	default:
		err = fmt.Errorf("the plugin entry cannot be inserted; it is tried again: %w", err)
		if errors.Is(err, unix.EROFS) || errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w; let the reconciler write to %s: in a container, mount it writable; in a systemd unit, "+
				"add ReadWritePaths=%s", err, dir, dir)
		}
		s.add(Problem{Err: err, key: "failure"})
	}
	if s.Flapping {
		then := "the entry is inserted again at once each time"
		if pause := m.removals.quickRemovals.Pause(); pause > 0 {
			then = fmt.Sprintf("the entry is inserted again after %s now", pause)
		}
		by := likelyWriter(m.network)
		s.add(Problem{key: "flapping", Err: fmt.Errorf("%s: the plugin entry is removed repeatedly, most likely by %s; %s: %s",
			policy.Printable(m.network.Path), by.name, then, by.remedy)})
	}
}

// logProblems logs what is new.
func (m *Manager) logProblems(s Status) {
	for _, p := range s.Problems {
		key := p.key
		if key == "" {
			key = p.Err.Error()
		}
		if !m.logged.Begins(key) {
			continue
		}
		if p.Waiting {
			m.options.Log.Info("waiting for the conflist", "reason", p.Reason, "err", p.Err.Error())
		} else {
			m.options.Log.Error("problem with the conflist", "reason", p.Reason, "err", p.Err.Error())
		}
	}
	if m.logged.Resolved() && s.Leader && !s.Wrote {
		m.options.Log.Info("the conflist has the plugin entry, and no problems any more")
	}
}

// writer is a program that writes conflists.
type writer struct {
	pattern string // a part of the name of its file, its network or one of its plugins
	name    string
	remedy  string // to make it leave the plugin entry in
}

func knownWriters() []writer {
	return []writer{
		{"cilium", "Cilium", `set cni.exclusive=false in its Helm values (cni-exclusive: "false" in its ConfigMap)`},
		{"kindnet", "kindnet", "its conflist is compiled in, without the plugin entry, and written at each start, " +
			"and by some versions whenever the Node object changes"},
		{"calico", "Calico's install-cni", "add the plugin entry to cni_network_config of the ConfigMap calico-config"},
		{"flannel", "flannel's install-cni", "add the plugin entry to cni-conf.json of the ConfigMap kube-flannel-cfg"},
	}
}

// likelyWriter returns the program that most likely rewrites a network's file.
func likelyWriter(n Network) writer {
	if len(renamedByCilium(filepath.Dir(n.Path))) > 0 {
		return knownWriters()[0]
	}
	names := strings.Join(append([]string{filepath.Base(n.Path), n.Name}, n.Conflist.Types...), " ")
	for _, w := range knownWriters() {
		if strings.Contains(names, w.pattern) {
			return w
		}
	}
	return writer{name: "the program that installs the main CNI plugin", remedy: "make it write the plugin entry too, or write the file only once"}
}

// renamedByCilium returns the files that Cilium has renamed so that no runtime loads them, as it does
// with cni.exclusive=true.
func renamedByCilium(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // Find reports it
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".cilium_bak") {
			names = append(names, e.Name())
		}
	}
	return names
}
