// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// follow decides which entry the network should have, and replaces the one that it has if that is ip-masq's
// and the entry file states another one. Ask is called before a replacement: an entry that fails every ADD
// changes nothing. A network without a path is not known now.
func (m *Manager) follow(ctx context.Context, n Network, s *Status) {
	record := readEntryRecord(m.RecordPath)
	good := []byte(record.Entry)
	if good == nil {
		good = m.Entry
	}
	entry := m.readEntryFile(record, good, s)
	if entry == nil {
		return
	}
	have := n.entryText()
	hasNoFile := n.Path == "" && good != nil // whose entry could be compared
	switch {
	case hasNoFile:
		m.Entry = good
	case have == nil:
		m.followInto(ctx, n, entry, good, s)
	case len(differences(entry, have)) == 0:
		m.useFromFile(entry)
		if !m.dry {
			s.warn(m.recordEntries(ctx, n, have)) // it is ip-masq's from now on
		}
	case !m.wroteEntry(n, record):
		// Only an entry that ip-masq wrote follows the file: an administrator may have edited any other.
		m.useFromFile(entry)
		s.found(EntryDiffers, "%s: the plugin entry of network %s differs from conflist.entry_file in %s, "+
			"and ip-masq did not write it",
			policy.Printable(n.Path), policy.Quote(n.Name), strings.Join(differences(entry, have), ", "))
	case !m.dry:
		m.replaceEntry(ctx, entry, good, s)
	}
}

// readEntryFile returns the entry of the entry file. Without one it returns nil, and the manager uses the
// last entry of the file, the last good one, or the default entry if there never was a file.
func (m *Manager) readEntryFile(record entryRecord, good []byte, s *Status) []byte {
	entry, fromFile, err := m.ReadEntry()
	isMissing := err == nil && !fromFile || errors.Is(err, fs.ErrNotExist)
	if isMissing && record.Entry != nil {
		m.useFromFile(record.Entry)
		s.found(EntryFileMissing, "conflist.entry_file does not exist any more; "+
			"the plugin entry stays as it is: %v", cmp.Or(err, fs.ErrNotExist))
		return nil
	}
	if err != nil {
		m.refuse(err, good, s)
		return nil
	}
	if !fromFile {
		m.Entry, m.FromFile = entry, false
		return nil
	}
	return entry
}

// useFromFile makes an entry of the entry file the one to insert.
func (m *Manager) useFromFile(entry []byte) { m.Entry, m.FromFile = entry, true }

// followInto decides about a file without an entry of its own: Ask is called before another entry than the
// last good one is inserted. Where Multus has the entry, nothing is inserted.
func (m *Manager) followInto(ctx context.Context, n Network, entry, good []byte, s *Status) {
	isNew := n.Entries == 0 && good != nil && len(differences(entry, good)) > 0
	if isNew && m.dry {
		return
	}
	if isNew {
		if err := m.ask(ctx, n, entry); err != nil {
			m.refuse(err, good, s)
			return
		}
	}
	m.useFromFile(entry)
}

// refuse keeps the last good entry.
func (m *Manager) refuse(err error, good []byte, s *Status) {
	m.Entry = good
	which := "the last good one"
	if good == nil {
		which = "none"
	}
	err = fmt.Errorf("the plugin entry: %w; until then %s is inserted", err, which)
	s.add(Problem{Reason: "source", Err: err})
}

type refusedError struct{ error }

// ask returns why no pod of a network would start with an entry.
func (e Editor) ask(ctx context.Context, n Network, entry []byte) error {
	path, doc, err := n.with(entry, true)
	if err == nil && e.Ask != nil {
		err = e.Ask(ctx, config.ParseConflist(path, doc))
	}
	if err != nil {
		return refusedError{fmt.Errorf("conflist.entry_file: no pod of network %s would start with it: %w",
			policy.Quote(n.Name), err)}
	}
	return nil
}

// replaceEntry replaces the network's entry, unless that failed only just now.
func (m *Manager) replaceEntry(ctx context.Context, entry, good []byte, s *Status) {
	if m.replacement.waits(s) {
		m.Entry = good
		s.add(m.problemOf("replaced", m.replacement.err))
		return
	}
	e := m.Editor
	e.Entry, e.FromFile, e.Replace = entry, true, true
	c, err := e.Insert(ctx)
	if _, isRefused := errors.AsType[refusedError](err); isRefused {
		m.refuse(err, good, s)
		return
	}
	m.useFromFile(entry)
	if err != nil {
		m.replacement.fail(err, s)
		s.add(m.problemOf("replaced", err))
		return
	}
	m.replacement = attempt{}
	if c.Wrote {
		m.noteChange(c, s)
		m.noteFile(c.Path)
		m.Log.Info("replaced the plugin entry", "file", policy.Printable(c.Path),
			"network", policy.Printable(c.Network), "changed", strings.Join(c.Replaced, ","))
	}
}

// entryText returns the text of the network's plugin entry, nil if the file has none of its own.
func (n Network) entryText() []byte {
	if len(n.Conflist.Entries) == 0 {
		return nil
	}
	return n.Conflist.Plugins[n.Conflist.Entries[0].Index]
}
