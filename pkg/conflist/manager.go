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
)

const (
	// The shortest time between two attempts to insert the entry; after a failure it doubles, up to maxWait.
	minWait = 100 * time.Millisecond
	maxWait = 30 * time.Second
	// So many removals within removalWindow are flapping, until the entry has stayed as long as they took, and minStay.
	flappingRemovals = 5
	removalWindow    = 10 * time.Minute
	minStay          = 10 * time.Second
)

// Manager keeps the entry in a network's conflist, and notices a program that removes it repeatedly.
type Manager struct {
	Editor // whose Entry is the last good one
	// ReadEntry returns the entry, and whether it is the entry file's, which is an fs.ErrNotExist if missing.
	ReadEntry func() (entry []byte, fromFile bool, err error)
	BinDir    string // the directory from which runtimes run the plugin
	Log       *slog.Logger

	// What the last sync found about the entry.
	entryProblems []Problem
	findings      []Finding
	warnings      []error
	notExchanged  error // of the last change of the file
	dry           bool  // nothing is written

	network  Network
	present  bool        // the entry was there when the conflist was last read or written
	removals []time.Time // when another program removed it, the last flappingRemovals times

	tried   time.Time     // the last attempt to insert the entry
	failure error         // why it failed
	wait    time.Duration // until the next one
}

// Status is the result of a sync.
type Status struct {
	Present  bool // the network has the plugin entry
	Flapping bool // another program removes it repeatedly
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

// Sync inserts the entry if it is missing, and replaces ip-masq's when the entry file changes. It waits for other
// processes of ip-masq until ctx ends.
func (m *Manager) Sync(ctx context.Context) Status {
	now := time.Now()
	n, err := m.find()
	var s Status
	// After the conflist was read: an entry that is missing now is replaced by the present one.
	m.warnings = nil
	m.follow(ctx, n)
	if err == nil {
		m.network, s.Present = n, n.Entries > 0
	}
	gone := errors.Is(err, ErrNoNetworks) || errors.Is(err, ErrNetworkNotFound)
	if err == nil || gone {
		m.seen(n, now)
	}
	missing := config.CheckPlugin(m.BinDir)
	switch {
	case err != nil:
	case n.Entries == 1 && !n.Generated:
		m.failure, m.wait = nil, minWait
		removed, err := m.removeCopy(ctx)
		m.logRemoved(removed)
		m.warn(err)
	case m.Entry == nil || missing != nil:
	default:
		err = m.insert(ctx, &s, n)
	}
	m.complete(&s, n, now, err, missing)
	return s
}

func (m *Manager) seen(n Network, now time.Time) {
	present := n.Entries > 0
	if ends := m.flappingEnds(); !ends.IsZero() && now.After(ends) {
		m.removals = nil
	}
	if m.present && !present {
		m.removals = append(m.removals[max(0, len(m.removals)-flappingRemovals+1):], now)
	}
	m.present = present
}

// complete adds what is known besides. The reconcile loop reports an entry that keeps pods from starting.
func (m *Manager) complete(s *Status, n Network, now time.Time, err, missing error) {
	if ends := m.flappingEnds(); !now.After(ends) {
		s.Flapping = true
		if s.Next.IsZero() || ends.Before(s.Next) {
			s.Next = ends.Add(1)
		}
	}
	s.Findings, s.Warnings = slices.Clip(m.findings), m.warnings
	if f := m.CopyFinding(); f != nil {
		s.Findings = append(s.Findings, *f)
	}
	if m.notExchanged != nil {
		s.Findings = append(s.Findings, Finding{NotExchanged, m.notExchanged.Error()})
	}
	for _, p := range m.entryProblems {
		s.add(p)
	}
	if missing != nil && !s.Present {
		s.add(Problem{Reason: "plugin", Err: fmt.Errorf("%w, so no plugin entry is inserted into the conflist, and no pod would start with it: "+
			`run "ip-masq-reconciler install", or in Kubernetes delete this node's pod of ip-masq, whose init container does; or name another directory with --cni-bin-dir`, missing)})
	}
	if s.Present {
		s.add(Problem{Err: n.MultusErr, Waiting: true})
	}
	p := m.problemOf("inserted", err)
	if s.add(p); s.Flapping {
		s.add(Problem{Err: fmt.Errorf("%s: the plugin entry is removed repeatedly, and inserted again each time; "+
			"make the program that writes the file keep the entry (Cilium: cni.exclusive=false)", policy.Printable(m.network.Path))})
	}
}

// flappingEnds returns when flapping ends, or ended, if the entry stays; zero if there was none.
func (m *Manager) flappingEnds() time.Time {
	if n := len(m.removals); n == flappingRemovals {
		if took := m.removals[n-1].Sub(m.removals[0]); took <= removalWindow {
			return m.removals[n-1].Add(max(took, minStay))
		}
	}
	return time.Time{}
}

func (m *Manager) insert(ctx context.Context, s *Status, n Network) error {
	began, due := time.Now(), m.tried.Add(m.wait)
	if began.Before(due) {
		s.Next = due
		return m.failure
	}
	c, err := m.Insert(ctx)
	m.logRemoved(c.Removed)
	now := time.Now()
	m.wait = min(2*max(m.wait, minWait), maxWait)
	isContent := isContentError(err) // only another program can change that: then there is an event
	if err == nil || isContent || errors.Is(err, errChanged) {
		m.wait = minWait
	}
	m.failure, m.tried = err, now
	if err == nil {
		m.present, s.Present, m.tried = true, true, began
	} else if !isContent {
		s.Next = now.Add(m.wait)
	}
	if !c.Wrote {
		return err
	}
	s.Inserted = 1
	text, level := "inserted the plugin entry", slog.LevelInfo
	switch removals := len(m.removals); {
	case n.Entries > 0:
		text = "updated the conflist"
	case removals > 1 && now.Sub(m.removals[removals-2]) < removalWindow:
		text, level = "restored the plugin entry", slog.LevelDebug // flapping is logged once
	case removals > 0:
		text = "restored the plugin entry"
	}
	args := []any{"file", policy.Printable(c.Path), "network", policy.Printable(c.Network)}
	if n.Multus != "" {
		args = append(args, "multus", policy.Printable(n.Multus))
	}
	if c.Backup != "" {
		args = append(args, "backup", policy.Printable(c.Backup))
	}
	m.Log.Log(ctx, level, text, args...)
	m.noteChange(c)
	return nil
}

func (m *Manager) logRemoved(file string) {
	if file != "" {
		m.Log.Info("removed the copy that an earlier version made", "file", policy.Printable(file))
	}
}

// isContentError reports whether an error is about what the files say, not about writing them.
func isContentError(err error) bool {
	known := []error{ErrNoNetworks, ErrNetworkNotFound, ErrBroken, ErrOnlyPlugin, ErrDelegate, config.ErrPosition}
	return slices.ContainsFunc(known, func(k error) bool { return errors.Is(err, k) })
}

func (s *Status) add(p Problem) {
	if p.Reason = cmp.Or(p.Reason, "conflist"); p.Err != nil {
		s.Problems = append(s.Problems, p)
	}
}

// problemOf returns the problem that an error is for the entry that was to be inserted or replaced; it has no Err if there is
// none.
func (m *Manager) problemOf(done string, err error) Problem {
	switch {
	case err == nil, errors.Is(err, config.ErrPosition):
		return Problem{}
	case errors.Is(err, ErrNoNetworks), errors.Is(err, ErrNetworkNotFound):
		return Problem{Err: fmt.Errorf("waiting for the main CNI plugin's network: %w; Cilium renames the files of others unless cni.exclusive=false", err), Waiting: true}
	case isContentError(err):
		return Problem{Err: err}
	}
	remedy := ""
	if errors.Is(err, unix.EROFS) || errors.Is(err, fs.ErrPermission) {
		dir := policy.Printable(m.Dir)
		remedy = "; let the reconciler write to " + dir + ": in a container, mount it writable; in a systemd unit, add ReadWritePaths=" + dir
	}
	return Problem{Err: fmt.Errorf("the plugin entry cannot be %s; it is tried again: %w%s", done, err, remedy)}
}

// The findings about the entry.
const (
	EntryDiffers     = "entry-differs"          // another program or a person has changed it
	EntryFileMissing = "entry-file-missing"     // it was there earlier
	NotExchanged     = "conflist-not-exchanged" // a write of another program may be lost
	ConflistCopy     = "conflist-copy"          // an earlier version made it
)

// Finding is a finding of status and doctor.
type Finding struct {
	ID      string `json:"id"`
	Message string `json:"message"`
}

// entryText returns the text of the network's plugin entry, nil if the file has none of its own.
func (n Network) entryText() []byte {
	if len(n.Conflist.Entries) == 0 {
		return nil
	}
	return n.Conflist.Plugins[n.Conflist.Entries[0].Index]
}

// follow decides which entry the network should have, and replaces the one that it has if that is ip-masq's and the
// entry file states another one. A replacement is asked for first: an entry that fails every ADD changes nothing.
func (m *Manager) follow(ctx context.Context, n Network) {
	m.entryProblems, m.findings = nil, nil
	record := config.ReadConflistRecord(m.RecordPath)
	entry, fromFile, err := m.ReadEntry()
	good := record.Entry
	if good == nil {
		good = m.Entry
	}
	switch {
	case record.Entry != nil && (err == nil && !fromFile || errors.Is(err, fs.ErrNotExist)):
		m.Entry, m.FromFile = record.Entry, true
		m.found(EntryFileMissing, "conflist.entry_file does not exist any more; the plugin entry stays as it is: %v", cmp.Or(err, fs.ErrNotExist))
		return
	case err != nil:
		m.refuse(err, good)
		return
	case !fromFile:
		m.Entry, m.FromFile = entry, false
		return
	}
	have, unknown := n.entryText(), n.Path == ""
	same := func(other []byte) bool { return other != nil && len(differences(entry, other)) == 0 }
	switch {
	case unknown && good != nil: // no conflist has the entry, so nothing can be compared
		m.Entry = good
	case unknown, same(have), have == nil && (n.Entries > 0 || good == nil || same(good)): // Multus may have it
		m.Entry, m.FromFile = entry, true
		if have != nil && !m.dry {
			m.warn(m.recordEntries(ctx, n, have))
		}
	case have != nil && !m.inserted(n, record):
		m.Entry, m.FromFile = entry, true
		m.found(EntryDiffers, "%s: the plugin entry of network %s differs from conflist.entry_file in %s, and ip-masq did not write it",
			policy.Printable(n.Path), policy.Quote(n.Name), strings.Join(differences(entry, have), ", "))
	case m.dry:
	case have != nil:
		m.replace(ctx, entry, good)
	default:
		if err := m.ask(ctx, n, entry); err != nil {
			m.refuse(err, good)
		} else {
			m.Entry, m.FromFile = entry, true
		}
	}
}

// Examine returns what Sync would find about the entry, and writes nothing.
func (m Manager) Examine(ctx context.Context) []Finding {
	m.dry, m.Backups = true, func() (string, error) { return filepath.Dir(m.RecordPath), nil }
	if n, err := m.find(); err == nil {
		m.follow(ctx, n)
	}
	return m.findings
}

func (m *Manager) refuse(err error, good []byte) {
	which := "the last good one"
	if m.Entry = good; good == nil {
		which = "none"
	}
	err = fmt.Errorf("the plugin entry: %w; until then %s is inserted", err, which)
	m.entryProblems = append(m.entryProblems, Problem{Reason: "source", Err: err})
}

func (e Editor) ask(ctx context.Context, n Network, entry []byte) error {
	path, doc, err := n.with(entry, true)
	if err == nil && e.Ask != nil {
		err = e.Ask(ctx, config.ParseConflist(path, doc))
	}
	if err != nil {
		return refusedError{fmt.Errorf("conflist.entry_file: no pod of network %s would start with it: %w", policy.Quote(n.Name), err)}
	}
	return nil
}

func (m *Manager) replace(ctx context.Context, entry, good []byte) {
	e := m.Editor
	e.Entry, e.FromFile, e.Replace = entry, true, true
	c, err := e.Insert(ctx)
	m.noteChange(c)
	if refused := (refusedError{}); errors.As(err, &refused) {
		m.refuse(err, good)
		return
	}
	m.Entry, m.FromFile = entry, true
	if err != nil {
		m.entryProblems = append(m.entryProblems, m.problemOf("replaced", err))
	} else if c.Wrote {
		m.Log.Info("replaced the plugin entry", "file", policy.Printable(c.Path), "network", policy.Printable(c.Network), "changed", strings.Join(c.Replaced, ","))
	}
}

type refusedError struct{ error }

func (m *Manager) found(id, format string, args ...any) {
	m.findings = append(m.findings, Finding{id, fmt.Sprintf(format, args...)})
}

func (m *Manager) warn(err error) {
	if err != nil {
		m.warnings = append(m.warnings, err)
	}
}

func (m *Manager) noteChange(c Change) {
	if c.BackupErr != nil {
		m.warn(fmt.Errorf("no backup of the conflist is kept in the data dir, so it is %s: %w", policy.Printable(c.Backup), c.BackupErr))
	} else {
		m.warn(c.RecordErr)
	}
	m.notExchanged = c.NotExchanged
}
