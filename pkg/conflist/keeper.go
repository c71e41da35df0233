// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// calm is how long nothing must have happened to files before they are
	// looked at: most programs write a file in more than one step.
	calm = 50 * time.Millisecond
	// calmAtMost bounds how long that can be put off by files that change all the
	// time.
	calmAtMost = 250 * time.Millisecond
	// What fails is tried again after firstRetry, and then after twice the time,
	// up to longestRetry: to try leaves traces that are told as changes. Who writes
	// the file all the time is done after longestRace.
	firstRetry   = 100 * time.Millisecond
	longestRetry = 30 * time.Second
	longestRace  = time.Second
)

// Options are what a Keeper keeps, and where.
type Options struct {
	Dir, Network, Backups string // as in Place

	Entry  func() ([]byte, error)     // returns the entry to put in
	Admits func(network string) error // as in Place
	Bin    string                     // the directory from which runtimes run the plugin

	// Changed delivers when something may have changed in Dir or Bin, or in the
	// directories of what Entry and Admits read, from before Run is called.
	Changed <-chan struct{}
	// Every is how long the Keeper goes without a look: changes can be lost.
	Every time.Duration
	// Leads tells whether it is for this process to write.
	Leads func() bool

	Log *slog.Logger
	// Tell is told after each look.
	Tell func(Status)
}

// Manager keeps our entry in the conflist of a network: it puts it in as soon as
// there is such a network, and back whenever it is gone. Who removes it again
// and again is named, and after a while waited for. It never takes anything out.
type Manager struct {
	options  Options
	wake     chan struct{}
	entry    source
	flapping war
	seen     Network // as it was last
	journal  journal

	failure  error // of the last try, until one succeeds
	failures int
	retryAt  time.Time
}

// NewManager returns a Keeper that has not looked yet.
func NewManager(o Options) *Manager {
	return &Manager{options: o, wake: make(chan struct{}, 1), entry: source{from: o.Entry}, journal: journal{log: o.Log}}
}

// Observe asks for a look at once, as when Leads says something else. It may be
// called by any goroutine and never waits.
func (k *Manager) Look() {
	select {
	case k.wake <- struct{}{}:
	default: // asked already
	}
}

// Run keeps the entry until ctx ends, and then leaves all as it is.
func (k *Manager) Run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var first time.Time // of the changes that were not looked at yet
	for {
		select {
		case <-ctx.Done():
			return
		case <-k.wake:
			timer.Reset(0)
			continue
		case <-k.options.Changed:
			now := time.Now()
			if first.IsZero() {
				first = now
			}
			timer.Reset(min(calm, first.Add(calmAtMost).Sub(now)))
			continue
		case <-timer.C:
		}
		first = time.Time{}
		s := k.look(ctx)
		if ctx.Err() != nil {
			return
		}
		k.journal.report(s)
		k.options.Tell(s)
		timer.Reset(time.Until(k.next(s)))
	}
}

// look looks at the files, and puts the entry in where it has to be.
func (k *Manager) look(ctx context.Context) Status {
	if !k.options.Leads() {
		k.flapping, k.failure, k.failures, k.retryAt = war{}, nil, 0, time.Time{}
		return Status{}
	}
	s := Status{Leads: true}
	now := time.Now()
	n, err := Find(k.options.Dir, k.options.Network)
	// After the file was looked at: what it lacks now gets what is to be put in now.
	entry, bad := k.entry.read()
	s.problem(bad)
	if err == nil {
		k.seen, s.Present = n, n.Entries > 0
	}
	k.judge(&s, err, now)
	plugin := config.CheckPlugin(k.options.Bin)
	switch {
	case err != nil:
	case n.Entries == 1 && !n.Made && (n.Multus == nil || !n.Multus.made):
		k.succeeded()
	case now.Before(k.retryAt):
		err = k.failure
	case entry != nil && plugin == nil && !now.Before(k.flapping.due()):
		err = k.put(ctx, &s, n, entry)
	}
	k.describe(&s, n, err, plugin)
	return s
}

// judge takes note of whether the entry is there.
func (k *Manager) judge(s *Status, err error, now time.Time) {
	switch {
	case s.Present:
		if count, span := k.flapping.span(now); k.flapping.there(now) {
			k.options.Log.Info("our entry stays in the conflist again", "file", policy.Printable(k.seen.Path),
				"removed", count, "within", span.Round(time.Second).String())
		}
	case err == nil, errors.Is(err, ErrNone), errors.Is(err, ErrNotThere):
		k.flapping.missing(now)
	}
	s.Flapping = k.flapping.on
}

// put makes sure that the network has the entry, once.
func (k *Manager) put(ctx context.Context, s *Status, n Network, entry []byte) error {
	p := Place{Dir: k.options.Dir, Network: k.options.Network, Entry: entry, Backups: k.options.Backups, Admits: k.options.Admits}
	c, err := p.Ensure(ctx)
	if errors.Is(err, errNoBackup) && ctx.Err() == nil {
		// Pods without our rules are worse than a file without a backup.
		p.Backups = ""
		reason := err
		if c, err = p.Ensure(ctx); err == nil && c.Wrote {
			k.journal.once("no backup can be kept of conflists", reason)
		}
	}
	now := time.Now()
	if err != nil {
		k.failed(err, now)
		s.Present = s.Present && !harmless(err)
		return err
	}
	k.succeeded()
	s.Present = true
	if !c.Wrote {
		return nil
	}
	s.Wrote = true
	text := "put our entry into the conflist"
	switch {
	case n.Entries > 1:
		text = "took out of the conflist what it had more than one entry of ours"
	case n.Entries == 1 && n.Made:
		text = "made the conflist anew, as the configuration that it was made of has changed"
	case !k.flapping.since.IsZero():
		text = "put our entry back into the conflist"
	}
	k.flapping.missing(now)
	k.flapping.there(now)
	s.Flapping = k.flapping.on
	k.journal.wrote(c, n.Multus, text, len(k.flapping.removals))
	return nil
}

func (k *Manager) succeeded() { k.failure, k.failures, k.retryAt = nil, 0, time.Time{} }

func (k *Manager) failed(err error, now time.Time) {
	if harmless(err) {
		k.succeeded() // nothing was tried that leaves traces: changes tell when to look again
		return
	}
	longest := longestRetry
	if errors.Is(err, ErrChanged) {
		longest = longestRace
	}
	k.failure, k.retryAt = err, now.Add(min(firstRetry<<min(k.failures, 16), longest))
	k.failures++
}

// harmless tells errors of what is there from those of trying to write.
func harmless(err error) bool {
	known := []error{ErrNone, ErrNotThere, ErrBroken, ErrElsewhere, ErrOnlyPlugin, ErrDelegate, config.ErrPosition}
	return slices.ContainsFunc(known, func(k error) bool { return errors.Is(err, k) })
}

// next is when to look again if nothing changes.
func (k *Manager) next(s Status) time.Time {
	now := time.Now()
	at := now.Add(k.options.Every)
	if !s.Leads {
		return at
	}
	for _, t := range []time.Time{k.flapping.due(), k.retryAt, k.flapping.peaceAt()} {
		if t.After(now) && t.Before(at) {
			at = t
		}
	}
	return at
}
