// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// The findings about the entry.
const (
	EntryDiffers     = "entry-differs"          // another program or a person has changed it
	EntryFileMissing = "entry-file-missing"     // it was there earlier
	NotExchanged     = "conflist-not-exchanged" // a write of another program may be lost
)

// Finding is a finding of status and doctor.
type Finding struct {
	ID  string
	Err error
}

// entryText returns the text of the network's plugin entry, nil if the file has none of its own.
func (n Network) entryText() []byte {
	if len(n.Conflist.Entries) == 0 {
		return nil
	}
	return n.Conflist.Plugins[n.Conflist.Entries[0].Index]
}

// valuesOf returns the values of the keys of an entry in a form without order and space.
func valuesOf(entry []byte) map[string]string {
	members, values := map[string]any{}, map[string]string{}
	d := json.NewDecoder(bytes.NewReader(entry))
	d.UseNumber()
	if d.Decode(&members) != nil {
		return values // no valid entry
	}
	for key, value := range members {
		text, _ := json.Marshal(value) // Decode made it
		values[key] = string(text)
	}
	return values
}

// differences returns the keys whose values differ in two entries, sorted.
func differences(a, b []byte) []string {
	in, other := valuesOf(a), valuesOf(b)
	keys := maps.Clone(in)
	maps.Copy(keys, other)
	maps.DeleteFunc(keys, func(key, _ string) bool {
		x, there := in[key]
		y, alsoThere := other[key]
		return there == alsoThere && x == y
	})
	return slices.Sorted(maps.Keys(keys))
}

// digestOf returns the digest of the JSON value of an entry.
func digestOf(entry []byte) string {
	text, _ := json.Marshal(valuesOf(entry)) // sorts the keys
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// inserted reports whether ip-masq has inserted the network's plugin entry as it is. One without a record, such as of
// an earlier version, is ip-masq's if the backup is the file without it.
func (e Editor) inserted(n Network, record config.ConflistRecord) bool {
	if n.own.main != nil {
		return true // what others change there is undone
	}
	if digests, known := record.Digests[n.Path]; known {
		return slices.Contains(digests, digestOf(n.entryText()))
	}
	if n.Generated || e.Backups == nil {
		return n.Generated
	}
	dir, err := e.Backups()
	if err != nil {
		return false
	}
	without, err := setEntry(n.Path, n.Conflist.Doc, nil, false)
	return err == nil && checkUnchanged(backupPath(dir, n.Path), without) == nil
}

// record changes the file about what ip-masq has inserted, if that changes anything. It forgets files that are gone.
func (e Editor) record(ctx context.Context, change func(*config.ConflistRecord)) error {
	if e.RecordPath == "" {
		return nil
	}
	if _, err := e.Backups(); err != nil {
		return fmt.Errorf("record the plugin entry: %w", err)
	}
	return inDir(ctx, e.RecordPath, func(d *safefile.Dir, name string) error {
		r, _ := config.ReadConflistRecord(e.RecordPath) // a damaged one is written again
		before, _ := json.Marshal(r)
		if r.Digests == nil {
			r.Digests = map[string][]string{}
		}
		change(&r)
		maps.DeleteFunc(r.Digests, func(path string, _ []string) bool {
			_, err := os.Lstat(path)
			return errors.Is(err, fs.ErrNotExist)
		})
		now, err := json.Marshal(r)
		if err != nil || bytes.Equal(before, now) {
			return err
		}
		return write(d, name, now)
	})
}

// write writes a record.
func write(d *safefile.Dir, name string, text []byte) error {
	temp, err := d.Stage(append(text, '\n'), nil)
	if err != nil {
		return err
	}
	return errors.Join(d.Rename(temp, name), d.Sync())
}

// recordEntries records these entries as ip-masq's in a file.
func (e Editor) recordEntries(ctx context.Context, path string, entries ...[]byte) error {
	return e.record(ctx, func(r *config.ConflistRecord) {
		var digests []string
		for _, entry := range entries {
			digests = append(digests, digestOf(entry))
		}
		r.Digests[path] = digests
		if e.FromFile {
			r.Entry = bytes.TrimSpace(entries[len(entries)-1])
		}
	})
}

// follow decides which entry the network should have, and replaces the one that it has if that is ip-masq's and the
// entry file states another one. A replacement is asked for first: an entry that fails every ADD changes nothing.
func (m *Manager) follow(ctx context.Context, n Network) {
	m.entryProblems, m.findings, m.differs = nil, nil, nil
	record, _ := config.ReadConflistRecord(m.RecordPath) // a damaged one says nothing, and is written again
	entry, fromFile, err := m.ReadEntry()
	good := record.Entry
	if good == nil {
		good = m.Entry
	}
	switch {
	case record.Entry != nil && (err == nil && !fromFile || errors.Is(err, fs.ErrNotExist)):
		m.Entry, m.FromFile = record.Entry, true
		m.found(EntryFileMissing, errors.New("conflist.entry_file does not exist any more; the plugin entry stays as it is"))
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
	case unknown && good != nil: // and nobody can be asked
		m.Entry = good
	case unknown, n.Entries > 0 && have == nil: // Multus has it
		m.Entry, m.FromFile = entry, true
	case same(have), have == nil && (good == nil || same(good)):
		m.Entry, m.FromFile = entry, true
		if have != nil && !m.dry {
			m.warn(m.recordEntries(ctx, n.Path, have))
		}
	case have != nil && !m.inserted(n, record):
		m.Entry, m.FromFile, m.differs = entry, true, differences(entry, have)
		m.found(EntryDiffers, fmt.Errorf("%s: the plugin entry of network %s differs from conflist.entry_file in %s, and ip-masq did not write it",
			policy.Printable(n.Path), policy.Quote(n.Name), strings.Join(m.differs, ", ")))
	case m.dry:
	default:
		if have != nil {
			m.replace(ctx, entry, good)
		} else if err := m.ask(ctx, n, entry); err != nil {
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

// refuse reports an entry that is not inserted.
func (m *Manager) refuse(err error, good []byte) {
	which := "the last good one"
	if m.Entry = good; good == nil {
		which = "none"
	}
	m.entryProblems = append(m.entryProblems, Problem{Reason: "source", Err: fmt.Errorf("the plugin entry: %w; until then %s is inserted", err, which)})
}

// ask returns why ADDs of the network would fail with an entry.
func (e Editor) ask(ctx context.Context, n Network, entry []byte) error {
	path := n.Path
	var doc []byte
	var err error
	switch {
	case n.own.main != nil:
		doc, err = n.ownText(entry)
	case n.Single:
		if doc, err = listOf(path, n.Conflist.Doc, entry); err == nil {
			path, err = generatedPath(path)
		}
	default:
		doc, err = setEntry(path, n.Conflist.Doc, entry, true)
	}
	if err == nil && e.Ask != nil {
		err = e.Ask(ctx, config.ParseConflist(path, doc))
	}
	if err != nil {
		return refusedError{fmt.Errorf("conflist.entry_file: no pod of network %s would start with it: %w", policy.Quote(n.Name), err)}
	}
	return nil
}

// replace replaces the plugin entry of ip-masq.
func (m *Manager) replace(ctx context.Context, entry, good []byte) {
	e := m.Editor
	e.Entry, e.FromFile, e.Replace = entry, true, true
	c, err := e.Insert(ctx)
	m.noteChange(c)
	var refused refusedError
	if errors.As(err, &refused) {
		m.refuse(err, good)
		return
	}
	m.Entry, m.FromFile = entry, true
	if err != nil {
		m.entryProblems = append(m.entryProblems, Problem{Err: fmt.Errorf("the plugin entry cannot be replaced; it is tried again: %w", err)})
	} else if c.Wrote {
		m.Log.Info("replaced the plugin entry", "file", policy.Printable(c.Path), "network", policy.Printable(c.Network), "changed", strings.Join(c.Replaced, ","))
	}
}

// refusedError is why ADDs would fail with an entry.
type refusedError struct{ error }

func (m *Manager) found(id string, err error) { m.findings = append(m.findings, Finding{id, err}) }

func (m *Manager) warn(err error) {
	if err != nil {
		m.warnings = append(m.warnings, err)
	}
}

// noteChange notes what a change of the file could not do.
func (m *Manager) noteChange(c Change) {
	if c.BackupErr != nil {
		m.warn(fmt.Errorf("no backup of the conflist was kept: %w", c.BackupErr))
	} else {
		m.warn(c.RecordErr)
	}
	m.notExchanged = c.NotExchanged
}
