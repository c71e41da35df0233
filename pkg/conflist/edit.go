// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Editor inserts the plugin entry into a network's file and removes it.
type Editor struct {
	Dir     string // the configuration directory of the runtimes
	Network string // "": the one that a runtime uses
	Entry   []byte // the entry to insert
	// FromFile tells that Entry comes from conflist.entry_file and is not the default.
	FromFile   bool
	Replace    bool   // an entry that is there, too
	RecordPath string // the file about what was inserted; "" for none
	CopyRecord string // the file about the copy of a conflist that an earlier version made; "" for none
	// Backups creates the directory for backups and returns its path; if it is nil, no backup is kept. Where
	// none can be kept there, it is kept beside the file: without a backup no file is changed.
	Backups func() (string, error)
	// Keep lists the base names of generated lists to which Multus delegates: Remove keeps the files.
	Keep []string
	// Check returns why the plugin would refuse every entry in a network; nil accepts all.
	Check func(network string) error
	// Ask returns why ADDs would fail with the entry of a conflist; nil accepts all. It is called before a
	// replacement.
	Ask func(ctx context.Context, list config.Conflist) error
}

// Change describes what an Editor did to the file of a network.
type Change struct {
	Network string `json:"network"`
	Path    string `json:"path"` // of the file that has, or had, the entry
	Wrote   bool   `json:"wrote"`
	Backup  string `json:"backup"` // of the file; "" if it was not written, or is new

	Removed string `json:"removed,omitempty"` // the copy that an earlier version made

	BackupErr    error `json:"-"` // why the backup is beside the file
	NotExchanged error `json:"-"` // why a simultaneous write of another program can be lost
	RecordErr    error `json:"-"` // why the entry is not on record as ip-masq's
	Before       int   `json:"-"` // the number of plugin entries before

	Differs  []string `json:"differs,omitempty"`  // keys in which an entry that stays differs from the entry file
	Replaced []string `json:"replaced,omitempty"` // keys in which a replaced entry differed
}

// maxAttempts is how often an edit is tried while another program changes the file.
const maxAttempts = 5

// Insert makes sure that the network has exactly one plugin entry; one that exists stays, unless Replace is
// set. From the configuration of a single plugin it generates a list, and updates that when the configuration
// changes. After an error the file is unchanged. Insert waits for other processes of ip-masq until ctx ends.
func (e Editor) Insert(ctx context.Context) (Change, error) {
	c, err := Change{}, errChanged
	for i := 0; i < maxAttempts && errors.Is(err, errChanged); i++ {
		c, err = e.insert(ctx)
	}
	return c, err
}

// Find returns the network that gets the entry, or why none can have it.
func (e Editor) Find() (Network, error) {
	n, err := e.find()
	if err == nil && e.Check != nil {
		if err = e.Check(n.Name); err != nil {
			err = fmt.Errorf("%s: %w", policy.Printable(n.Path), err)
		}
	}
	return n, cmp.Or(err, n.Conflist.PositionErr())
}

func (e Editor) insert(ctx context.Context) (Change, error) {
	n, err := e.Find()
	c := Change{Network: n.Name, Path: n.Path, Before: n.Entries}
	if err != nil {
		return c, err
	}
	c, err = e.insertInto(ctx, c, n)
	if err != nil {
		return c, err
	}
	// The entry is there: a copy that cannot be removed now is removed another time.
	c.Removed, err = e.removeCopy(ctx)
	c.RecordErr = cmp.Or(c.RecordErr, err)
	return c, nil
}

func (e Editor) insertInto(ctx context.Context, c Change, n Network) (Change, error) {
	was := n.Conflist.Doc
	switch {
	case n.Conflist.IsMultus(): // and has the entry
		return c, nil
	case !n.Conflist.IsList():
		was = nil
	case n.Generated && n.Original == "":
		// It would stay the first file, before that of the next main CNI plugin.
		if c, err := e.write(ctx, c, c.Path, was, nil); err != nil {
			return c, err
		}
		return e.insert(ctx)
	}
	entry, have := e.Entry, n.entryText()
	if have != nil && !e.Replace {
		entry = have
	}
	path, now, err := n.with(entry, e.Replace && len(differences(have, entry)) > 0)
	if err != nil {
		return c, err
	}
	c.Path = path
	return e.writeEntry(ctx, c, n, n.Path, was, now)
}

// with returns the text of the network's file with an entry, and the path of the file.
func (n Network) with(entry []byte, replace bool) (path string, text []byte, err error) {
	path = n.Path
	from, doc := path, n.Conflist.Doc
	switch {
	case !n.Conflist.IsList():
		path = generatedPath(path)
	case n.Generated && n.Original != "": // which may have changed
		from = n.Original
		if doc, _, err = safefile.ReadFile(from, maxSize); errors.Is(err, fs.ErrNotExist) {
			err = errChanged
		}
	}
	if err == nil {
		text, err = setEntry(from, doc, entry, replace)
	}
	return path, text, err
}

// writeEntry writes the file of a network, and records the entry: while it replaces one, both.
func (e Editor) writeEntry(ctx context.Context, c Change, n Network, model string, was, now []byte) (Change, error) {
	have := n.entryText()
	written := Network{Path: c.Path, Generated: n.Generated || !n.Conflist.IsList(), Conflist: config.ParseConflist(c.Path, now)}
	switch differs := differences(have, e.Entry); {
	case have != nil && (!e.Replace || n.Entries > 1): // it stays
		if len(differs) == 0 {
			c.RecordErr = e.recordEntries(ctx, written, have)
		} else {
			c.RecordErr = e.recordEntries(ctx, written)
		}
		if e.FromFile {
			c.Differs = differs
		}
		return e.write(ctx, c, model, was, now)
	case have != nil && len(differs) > 0:
		if err := e.ask(ctx, n, e.Entry); err != nil {
			return c, err
		}
		c.RecordErr, c.Replaced = e.recordEntries(ctx, written, have, e.Entry), differs
	}
	c, err := e.write(ctx, c, model, was, now)
	if err == nil {
		c.RecordErr = e.recordEntries(ctx, written, e.Entry)
	}
	return c, err
}

// write backs a file up and replaces its text; nil is the text of a missing file, which gets the mode of the
// model.
func (e Editor) write(ctx context.Context, c Change, model string, was, now []byte) (Change, error) {
	if bytes.Equal(was, now) {
		return c, nil
	}
	var err error
	if e.Backups != nil && was != nil {
		c.Backup, c.BackupErr = backup(ctx, e.Backups, c.Path, was)
		if ctx.Err() != nil {
			return c, context.Cause(ctx)
		}
		if c.BackupErr != nil {
			c.Backup, err = backupBeside(ctx, c.Path, was)
		}
	}
	if err != nil {
		return c, err
	}
	if now == nil {
		err = removeFile(ctx, c.Path, was)
	} else {
		c.NotExchanged, err = replace(ctx, c.Path, model, was, now)
	}
	c.Wrote = err == nil
	return c, err
}

// Remove removes the plugin entries of all networks, the generated lists and the copy that an earlier version
// made. It goes on after an error, and returns the changes beside the errors: a file that does not parse may
// have an entry.
func (e Editor) Remove() ([]Change, error) {
	var changes []Change
	err := errChanged
	for i := 0; i < maxAttempts && errors.Is(err, errChanged); i++ {
		dir, readErr := config.ReadConfDir(e.Dir)
		if readErr != nil && !errors.Is(readErr, fs.ErrNotExist) {
			return changes, readErr
		}
		var errs []error
		for _, list := range dir.Conflists {
			c, err := e.removeFrom(list)
			if c.Wrote {
				changes = append(changes, c)
			}
			errs = append(errs, err)
		}
		if err = errors.Join(errs...); err == nil && readErr == nil { // locking the directory removes the temporary files of killed processes
			err = inDir(context.Background(), e.Dir+"/.", func(*safefile.Dir, string) error { return nil })
		}
	}
	return changes, err
}

func (e Editor) removeFrom(list config.Conflist) (Change, error) {
	c := Change{Network: list.Network, Path: list.File}
	ctx := context.Background()
	used := slices.Contains(e.Keep, filepath.Base(list.File))
	record := readEntryRecord(e.RecordPath)
	isOwn := isKnownGenerated(list, record) || readCopyRecord(e.CopyRecord).isCopy(list)
	switch {
	case isOwn && !used:
		return e.write(ctx, c, c.Path, list.Doc, nil)
	case isGenerated(list, record) && !used:
		// Perhaps an administrator changed it. The other backups go with the dataDir.
		kept, err := backupBeside(ctx, c.Path, list.Doc)
		if err != nil {
			return c, err
		}
		c, err = e.write(ctx, c, c.Path, list.Doc, nil)
		c.Backup = kept
		return c, err
	case list.Err != nil && list.Doc != nil && !bytes.Contains(list.Doc, []byte(`"`+config.PluginType+`"`)):
		return c, nil
	case list.Err != nil:
		return c, fmt.Errorf("%w, and it may have the plugin entry; fix or remove it: %w", ErrBroken, list.Err)
	case !list.IsList() && len(list.Entries) > 0:
		return c, fmt.Errorf("%s: %w", policy.Printable(list.File), ErrOnlyPlugin)
	case !list.IsList():
		return c, nil
	}
	now, err := setEntry(list.File, list.Doc, nil, false)
	if err != nil {
		return c, err
	}
	return e.write(ctx, c, c.Path, list.Doc, now)
}

// find returns the network that gets the entry. The copy that an earlier version made is no network.
func (e Editor) find() (Network, error) {
	c, err := config.ReadConfDir(e.Dir)
	lists := slices.DeleteFunc(slices.Clone(c.Conflists), readCopyRecord(e.CopyRecord).isCopy)
	n, err := find(e.Dir, e.Network, lists, c.Conflists, err)
	if err == nil && isGenerated(n.Conflist, readEntryRecord(e.RecordPath)) {
		n.Generated, n.Original = true, original(n.Path)
	}
	return n, err
}
