// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Manager keeps the entry in a network's conflist, and notices programs that remove it or fight about the
// file.
type Manager struct {
	Editor // whose Entry is the last good one
	// ReadEntry returns the entry, and whether it is the entry file's, which is an fs.ErrNotExist if missing.
	ReadEntry func() (entry []byte, fromFile bool, err error)
	BinDir    string // the directory from which runtimes run the plugin
	Log       *slog.Logger

	flapping     flapping
	attempt      attempt // to insert the entry
	replacement  attempt // of the entry; without a time unless the last one failed
	removal      attempt // of the copy that an earlier version made; likewise
	others       attempt // to replace the entry in other files of the network; likewise
	notExchanged error   // of the last change of the file
	dry          bool    // nothing is written
}

// Status is the result of a sync.
type Status struct {
	Present  bool // the network has the plugin entry
	Flapping bool // another program removes it repeatedly, or others fight about the file
	Inserted int  // how often it was inserted
	Problems []Problem
	Warnings []error   // which stop nothing
	Findings []Finding // beside the problems
	Next     time.Time // when the next sync is due although nothing has changed; zero if none is
}

// Problem is a reason why the node is not ready.
type Problem struct {
	Err     error
	Waiting bool   // for something that is expected to come by itself
	Reason  string // conflist, plugin for its binary or source for conflist.entry_file; as /readyz says
}

// The findings about the entry.
const (
	EntryDiffers     = "entry-differs"          // another program or a person has changed it
	EntryFileMissing = "entry-file-missing"     // it was there earlier
	NotExchanged     = "conflist-not-exchanged" // a write of another program may be lost
	ConflistCopy     = "conflist-copy"          // an earlier version made it
	ListChanged      = "generated-list-changed" // so it does not follow the file that it was made of
)

// Finding is a finding of status and doctor.
type Finding struct {
	ID      string `json:"id"`
	Message string `json:"message"`
}

// Sync inserts the entry if it is missing, and replaces ip-masq's when the entry file changes. It waits for
// other processes of ip-masq, but not longer than lockWait.
func (m *Manager) Sync(ctx context.Context) Status {
	now := time.Now()
	s := Status{}
	n, err := m.find()
	isGone := errors.Is(err, ErrNoNetworks) || errors.Is(err, ErrNetworkNotFound)
	if err == nil || isGone {
		m.flapping.look(n, now)
	}
	s.Present = err == nil && n.Entries > 0
	// The entry file is read after the conflist, so an entry that is inserted is not older than the conflist.
	m.follow(ctx, n, &s)

	pluginErr := config.CheckPlugin(m.BinDir)
	isRight := n.Entries == 1 && !n.Generated
	canInsert := m.Entry != nil && pluginErr == nil // no pod would start without the plugin
	if err == nil && isRight {
		m.attempt = attempt{wait: minWait, file: n.Path}
		s.warn(m.removeCopyLogged(ctx, &s))
		s.warn(m.followInOthers(ctx, n, &s))
	} else if err == nil && canInsert {
		err = m.insert(ctx, n, &s)
	}
	m.addFindings(&s)
	m.addProblems(n, err, pluginErr, now, &s)
	return s
}

// Examine returns what Sync would find about the entry, and writes nothing: the directory of backups, which
// tells whether ip-masq inserted the entry, is not created for that.
func (m Manager) Examine(ctx context.Context) []Finding {
	m.dry, m.Backups = true, func() (string, error) { return filepath.Dir(m.RecordPath), nil }
	s := Status{}
	if n, err := m.find(); err == nil {
		m.follow(ctx, n, &s)
	}
	return s.Findings
}

func (m *Manager) addFindings(s *Status) {
	for _, f := range []*Finding{m.CopyFinding(), m.GeneratedFinding()} {
		if f != nil {
			s.Findings = append(s.Findings, *f)
		}
	}
	if m.notExchanged != nil {
		s.Findings = append(s.Findings, Finding{NotExchanged, m.notExchanged.Error()})
	}
}

// addProblems adds the problems besides those of the entry file. The reconcile loop reports an entry that
// keeps pods from starting.
func (m *Manager) addProblems(n Network, err, pluginErr error, now time.Time, s *Status) {
	if pluginErr != nil && !s.Present {
		err := fmt.Errorf("%w, so no plugin entry is inserted into the conflist, "+
			"and no pod would start with it: "+
			`run "ip-masq-reconciler install", or in Kubernetes delete this node's pod of ip-masq, `+
			"whose init container does; or name another directory with --cni-bin-dir", pluginErr)
		s.add(Problem{Reason: "plugin", Err: err})
	}
	if s.Present {
		s.add(Problem{Err: n.MultusErr, Waiting: true})
	}
	s.add(m.problemOf("inserted", err))
	if !m.flapping.isActive(now) {
		return
	}
	s.Flapping = true
	s.dueBy(m.flapping.ends().Add(1)) // at its end it is still active
	s.add(Problem{Err: m.flappingErr(n)})
}

func (m *Manager) flappingErr(n Network) error {
	if m.flapping.isFight() {
		isOurs := func(plugin string) bool { return plugin == config.PluginType }
		others := slices.DeleteFunc(slices.Clone(n.Conflist.Types), isOurs)
		slices.Sort(others) // their order is what the fight is about: with it each write would be another problem
		return fmt.Errorf("%s: other programs write the file again and again; its plugins are %s: "+
			"make the programs that insert these plugins accept each other's, or stop one of them",
			policy.Printable(n.Path), policy.Printable(strings.Join(others, ", ")))
	}
	return fmt.Errorf("%s: the plugin entry is removed repeatedly, and inserted again each time; "+
		"make the program that writes the file keep the entry (Cilium: cni.exclusive=false)",
		policy.Printable(cmp.Or(n.Path, m.Dir)))
}

const (
	// The shortest time between two attempts to write; after a failure it doubles, up to maxWait.
	minWait = 100 * time.Millisecond
	maxWait = 30 * time.Second
)

// attempt is the last attempt to write. One that fails may have created and removed a file in the watched
// directory, so without a wait it would be the reason for the next one.
type attempt struct {
	at   time.Time
	err  error
	wait time.Duration // until the next one
	file string        // that had the entry last
}

func (a *attempt) due() time.Time { return a.at.Add(a.wait) }

// waits reports whether the next attempt is not due yet, and makes a sync due when it is.
func (a *attempt) waits(s *Status) bool {
	due := a.due()
	isEarly := time.Now().Before(due)
	if isEarly {
		s.dueBy(due)
	}
	return isEarly
}

// insert inserts the entry, unless the last attempt was only just made.
func (m *Manager) insert(ctx context.Context, n Network, s *Status) error {
	if m.attempt.waits(s) {
		return m.attempt.err
	}
	began := time.Now()
	c, err := m.Insert(ctx)
	m.logRemoved(c.Removed)
	if err != nil {
		m.attempt.fail(err, s)
		return err
	}
	isMoved := m.attempt.file != "" && m.attempt.file != c.Path
	m.attempt = attempt{at: began, wait: minWait, file: c.Path}
	s.Present = true
	m.noteFile(c.Path)
	if c.Wrote && n.Entries == 0 {
		s.Inserted = 1
	}
	if c.Wrote {
		m.logInserted(ctx, n, c, isMoved)
		m.noteChange(c, s)
	}
	return nil
}

// fail notes that an attempt failed, and makes a sync due when the next one is, unless only another program
// can change what failed: then there is an event.
func (a *attempt) fail(err error, s *Status) {
	wait := min(2*max(a.wait, minWait), maxWait)
	if isContentError(err) || errors.Is(err, errChanged) {
		wait = minWait
	}
	*a = attempt{at: time.Now(), err: err, wait: wait, file: a.file}
	if !isContentError(err) {
		s.dueBy(a.due())
	}
}

// logInserted logs that the entry was written. An entry that another program has removed twice within
// flappingWindow is restored without a line at level info: the status has the flapping.
func (m *Manager) logInserted(ctx context.Context, n Network, c Change, isMoved bool) {
	removals := m.flapping.removals
	isUpdate := n.Entries > 0
	isRestored := !isUpdate && !isMoved && len(removals) > 0
	isRepeated := isRestored && len(removals) > 1 && time.Since(removals[len(removals)-2]) < flappingWindow
	text, level := "inserted the plugin entry", slog.LevelInfo
	if isUpdate {
		text = "updated the conflist"
	}
	if isRestored {
		text = "restored the plugin entry"
	}
	if isRepeated {
		level = slog.LevelDebug
	}
	args := []any{"file", policy.Printable(c.Path), "network", policy.Printable(c.Network)}
	if n.Multus != "" {
		args = append(args, "multus", policy.Printable(n.Multus))
	}
	if c.Backup != "" {
		args = append(args, "backup", policy.Printable(c.Backup))
	}
	m.Log.Log(ctx, level, text, args...)
}

// noteFile notes that ip-masq wrote the file, or found it as it should be.
func (m *Manager) noteFile(path string) {
	doc, _, _ := safefile.ReadFile(path, maxSize) // of one that cannot be read the next look says why
	m.flapping.remember(path, doc, true)
}

func (m *Manager) noteChange(c Change, s *Status) {
	if c.BackupErr != nil {
		s.warn(fmt.Errorf("no backup of the conflist is kept in the data dir, so it is %s: %w",
			policy.Printable(c.Backup), c.BackupErr))
	} else {
		s.warn(c.RecordErr)
	}
	m.notExchanged = c.NotExchanged
}

// removeCopyLogged removes the copy that an earlier version made, unless that failed only just now.
func (m *Manager) removeCopyLogged(ctx context.Context, s *Status) error {
	if m.removal.waits(s) {
		return m.removal.err
	}
	removed, err := m.removeCopy(ctx)
	m.logRemoved(removed)
	if err != nil {
		m.removal.fail(err, s)
		return err
	}
	m.removal = attempt{}
	return nil
}

func (m *Manager) logRemoved(file string) {
	if file != "" {
		m.Log.Info("removed the copy that an earlier version made", "file", policy.Printable(file))
	}
}

// isContentError reports whether an error is about what the files say, not about writing them.
func isContentError(err error) bool {
	for _, known := range []error{
		ErrNoNetworks, ErrNetworkNotFound, ErrBroken, ErrOnlyPlugin, ErrDelegate, ErrTaken, config.ErrPosition,
	} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// problemOf returns the problem that an error is for the entry that was to be inserted or replaced; it has no
// Err if there is none.
func (m *Manager) problemOf(done string, err error) Problem {
	switch {
	case err == nil, errors.Is(err, config.ErrPosition):
		return Problem{}
	case errors.Is(err, ErrNoNetworks), errors.Is(err, ErrNetworkNotFound):
		err = fmt.Errorf("waiting for the main CNI plugin's network: %w; Cilium renames the files of others "+
			"unless cni.exclusive=false", err)
		return Problem{Err: err, Waiting: true}
	case isContentError(err):
		return Problem{Err: err}
	}
	remedy := ""
	if errors.Is(err, unix.EROFS) || errors.Is(err, fs.ErrPermission) {
		dir := policy.Printable(m.Dir)
		remedy = "; let the reconciler write to " + dir + ": in a container, mount it writable; " +
			"in a systemd unit, add ReadWritePaths=" + dir
	}
	err = fmt.Errorf("the plugin entry cannot be %s; it is tried again: %w%s", done, err, remedy)
	return Problem{Err: err}
}

func (s *Status) add(p Problem) {
	if p.Err == nil {
		return
	}
	p.Reason = cmp.Or(p.Reason, "conflist")
	s.Problems = append(s.Problems, p)
}

// dueBy makes the next sync due at that time at the latest.
func (s *Status) dueBy(t time.Time) {
	if s.Next.IsZero() || t.Before(s.Next) {
		s.Next = t
	}
}

func (s *Status) found(id, format string, args ...any) {
	s.Findings = append(s.Findings, Finding{id, fmt.Sprintf(format, args...)})
}

func (s *Status) warn(err error) {
	if err != nil {
		s.Warnings = append(s.Warnings, err)
	}
}
