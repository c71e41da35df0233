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
	// Backups creates the directory for backups and returns its path. Where no backup can be kept there,
	// it is kept beside the file: without a backup no file is changed. nil keeps no backups; with a
	// RecordPath or a CopyRecord it must be set, as it creates the dataDir.
	Backups func() (string, error)
	// Keep lists the base names of generated lists to which Multus delegates: Remove keeps the files.
	Keep []string
	// Check returns why the plugin would refuse every entry in a network; nil accepts all.
	Check func(network string) error
	// Ask returns why ADDs would fail with the entry of a conflist; nil accepts all. It is called before a
	// replacement, and before another entry than the last good one is inserted.
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
	// Stays is what is to be known of a list that stays: ip-masq generated it, and another program changed
	// it.
	Stays  string `json:"-"`
	Before int    `json:"-"` // the number of plugin entries before

	// Differs are the keys in which an entry that stays differs from the entry file.
	Differs  []string `json:"differs,omitempty"`
	Replaced []string `json:"replaced,omitempty"` // keys in which a replaced entry differed
}

// maxAttempts is how often an edit is tried while another program changes the file.
const maxAttempts = 5

// Insert makes sure that the network has exactly one plugin entry; one that exists stays, unless Replace is
// set. From the configuration of a single plugin it generates a list, and updates that when the configuration
// changes. After an error the file is unchanged, unless only what follows the write failed, such as to sync
// the directory; a generated list whose original is gone may have been removed before. Insert waits for other
// processes of ip-masq, but not longer than lockWait.
func (e Editor) Insert(ctx context.Context) (Change, error) {
	c, err := e.insert(ctx)
	for i := 1; i < maxAttempts && errors.Is(err, errChanged); i++ {
		c, err = e.insert(ctx)
	}
	return c, err
}

// Find returns the network that gets the entry, or why none can have it. An entry that is the first plugin is
// not moved: an administrator may have meant it so.
func (e Editor) Find() (Network, error) {
	n, err := e.find()
	if err != nil {
		return n, err
	}
	if e.Check != nil {
		if err := e.Check(n.Name); err != nil {
			return n, fmt.Errorf("%s: %w", policy.Printable(n.Path), err)
		}
	}
	return n, n.Conflist.PositionErr()
}

func (e Editor) insert(ctx context.Context) (Change, error) {
	c, err := e.insertEntry(ctx)
	if err != nil {
		return c, err
	}
	// The entry is there: a copy that cannot be removed now is removed another time.
	c.Removed, err = e.removeCopy(ctx)
	c.RecordErr = cmp.Or(c.RecordErr, err)
	return c, nil
}

func (e Editor) insertEntry(ctx context.Context) (Change, error) {
	n, err := e.Find()
	c := Change{Network: n.Name, Path: n.Path, Before: n.Entries}
	if err != nil {
		return c, err
	}
	return e.insertInto(ctx, c, n)
}

func (e Editor) insertInto(ctx context.Context, c Change, n Network) (Change, error) {
	if n.Conflist.IsMultus() { // find returns a file of Multus only if it has the entry
		return c, nil
	}
	isStale := n.Generated && n.Original == ""
	if isStale {
		// It would stay the first file, before that of the next main CNI plugin.
		c, err := e.write(ctx, c, c.Path, n.Conflist.Doc, nil)
		if err != nil {
			return c, err
		}
		return e.insertEntry(ctx)
	}
	edit, err := e.editOf(n)
	if err != nil {
		return c, err
	}
	c.Path = edit.after.Path
	if e.keeps(n) {
		return e.writeAround(ctx, c, edit)
	}
	return e.writeEntry(ctx, c, edit)
}

// listEdit is the edit that gives a network its entry. The file before it and the file after it are two where
// a list is generated from the configuration of a single plugin.
type listEdit struct {
	before, after Network
	was           []byte // the text of the file after it until now; nil if there is no such file
}

// editOf returns the edit that gives a network exactly one entry, in a list.
func (e Editor) editOf(n Network) (listEdit, error) {
	was := n.Conflist.Doc
	isNewList := !n.Conflist.IsList()
	if isNewList {
		was = nil
		err := e.checkNotTaken(n.Path)
		if err != nil {
			return listEdit{}, err
		}
	}
	entry := e.Entry
	if e.keeps(n) {
		entry = n.entryText()
	}
	isReplaced := e.Replace && len(differences(n.entryText(), entry)) > 0
	path, now, err := n.with(entry, isReplaced)
	if err != nil {
		return listEdit{}, err
	}
	after := Network{
		Path:      path,
		Generated: n.Generated || isNewList,
		Conflist:  config.ParseConflist(path, now),
	}
	return listEdit{before: n, after: after, was: was}, nil
}

// keeps reports whether a network's file keeps the entry that it has, the first of several.
func (e Editor) keeps(n Network) bool { return n.entryText() != nil && !e.Replace }

// with returns the text of the network's file with an entry, and the path of the file.
func (n Network) with(entry []byte, replace bool) (path string, text []byte, err error) {
	if !n.Conflist.IsList() {
		text, err = setEntry(n.Path, n.Conflist.Doc, entry, replace)
		return generatedPath(n.Path), text, err
	}
	from, doc := n.Path, n.Conflist.Doc
	if n.Generated && n.Original != "" { // which may have changed
		from = n.Original
		doc, _, err = safefile.ReadFile(from, maxSize)
		if errors.Is(err, fs.ErrNotExist) {
			err = errChanged
		}
		if err != nil {
			return n.Path, nil, err
		}
	}
	text, err = setEntry(from, doc, entry, replace)
	return n.Path, text, err
}

// writeEntry writes a new entry and records it. Before it replaces an entry it records the old one and the
// new one, so that after a process was killed in between either counts as ip-masq's.
func (e Editor) writeEntry(ctx context.Context, c Change, edit listEdit) (Change, error) {
	have := edit.before.entryText()
	differs := differences(have, e.Entry)
	isReplaced := have != nil && len(differs) > 0
	if isReplaced {
		err := e.ask(ctx, edit.before, e.Entry)
		if err != nil {
			return c, err
		}
		c.RecordErr = e.recordEntries(ctx, edit.after, have, e.Entry)
		c.Replaced = differs
	}
	c, err := e.writeList(ctx, c, edit)
	if err != nil {
		return c, err
	}
	c.RecordErr = e.recordEntries(ctx, edit.after, e.Entry)
	return c, nil
}

// writeAround writes the file around an entry that stays. If that is the entry to insert, it is ip-masq's
// from now on.
func (e Editor) writeAround(ctx context.Context, c Change, edit listEdit) (Change, error) {
	have := edit.before.entryText()
	differs := differences(have, e.Entry)
	if len(differs) == 0 {
		c.RecordErr = e.recordEntries(ctx, edit.after, have)
	} else {
		c.RecordErr = e.recordEntries(ctx, edit.after)
	}
	if e.FromFile {
		c.Differs = differs
	}
	return e.writeList(ctx, c, edit)
}

// writeList writes the file after an edit, with the mode and owner of the file before it.
func (e Editor) writeList(ctx context.Context, c Change, edit listEdit) (Change, error) {
	return e.write(ctx, c, edit.before.Path, edit.was, edit.after.Conflist.Doc)
}

// write backs a file up and replaces its text. nil is the text of a file that does not exist: before, it is
// created with the mode of the model; after, it is removed.
func (e Editor) write(ctx context.Context, c Change, model string, was, now []byte) (Change, error) {
	if bytes.Equal(was, now) {
		return c, nil
	}
	if e.Backups != nil && was != nil {
		c.Backup, c.BackupErr = backup(ctx, e.Backups, c.Path, was)
	}
	if ctx.Err() != nil {
		return c, context.Cause(ctx)
	}
	var err error
	if c.BackupErr != nil {
		c.Backup, err = backupBeside(ctx, c.Path, was)
		if err != nil {
			return c, err
		}
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
// have an entry. Among the changes are those of lists that stay, written or not.
func (e Editor) Remove() ([]Change, error) {
	changes, err := e.remove()
	for i := 1; i < maxAttempts && errors.Is(err, errChanged); i++ {
		var more []Change
		more, err = e.remove()
		changes = append(changes, more...)
	}
	return changes, err
}

func (e Editor) remove() ([]Change, error) {
	dir, err := config.ReadConfDir(e.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var changes []Change
	var errs []error
	for _, list := range dir.Conflists {
		c, err := e.removeFrom(list, dir.Conflists)
		errs = append(errs, err)
		if c.Wrote || c.Stays != "" {
			changes = append(changes, c)
		}
	}
	err = errors.Join(errs...)
	if err != nil {
		return changes, err
	}
	// To lock the directory removes the temporary files of processes that were killed.
	nothing := func(*safefile.Dir, string) error { return nil }
	return changes, inDir(context.Background(), e.Dir+"/.", nothing)
}

// removeFrom removes the entry from one of all files, or the file, if ip-masq made it.
func (e Editor) removeFrom(list config.Conflist, all []config.Conflist) (Change, error) {
	c := Change{Network: list.Network, Path: list.File}
	if list.Err != nil {
		return c, mayHaveEntryErr(list)
	}
	if !list.IsList() {
		return c, onlyPluginErr(list)
	}
	ctx := context.Background()
	switch e.makerOf(list) {
	case generatedUnchanged:
		return e.write(ctx, c, c.Path, list.Doc, nil)
	case generatedPerhaps:
		return e.removePerhapsChanged(ctx, c, list)
	case generatedThenChanged:
		c.Stays = fmt.Sprintf("%s stays, as another program has changed it since ip-masq made it of %s; "+
			"the runtime goes on using it",
			policy.Printable(list.File), policy.Printable(originalPath(list.File)))
	case copiedByEarlierVersion:
		copied := readCopyRecord(e.CopyRecord)
		if copied.isReplaceable(all) {
			return e.write(ctx, c, c.Path, list.Doc, nil)
		}
		c.Stays = fmt.Sprintf("%s stays without the plugin entry, as the runtime has no other network: %s, "+
			"which it was copied from, is not there or is broken",
			policy.Printable(list.File), policy.Printable(copied.Main))
	}
	without, err := setEntry(list.File, list.Doc, nil, false)
	if err != nil {
		return c, err
	}
	return e.write(ctx, c, c.Path, list.Doc, without)
}

// mayHaveEntryErr returns an ErrBroken if a file that cannot be loaded may have the plugin entry.
func mayHaveEntryErr(list config.Conflist) error {
	isRead := list.Doc != nil
	if isRead && !bytes.Contains(list.Doc, []byte(`"`+config.PluginType+`"`)) {
		return nil
	}
	return fmt.Errorf("%w, and it may have the plugin entry; fix or remove it: %w", ErrBroken, list.Err)
}

// onlyPluginErr returns an ErrOnlyPlugin if the configuration of a single plugin is the plugin entry.
func onlyPluginErr(conf config.Conflist) error {
	if len(conf.Entries) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %w", policy.Printable(conf.File), ErrOnlyPlugin)
}

// maker is who made a list, as far as that decides what Remove does with it.
type maker int

const (
	madeByOthers           maker = iota // only the entry is ip-masq's
	generatedUnchanged                  // ip-masq generated it, and it is as it was generated
	generatedPerhaps                    // it has the form of a generated list, and no record
	generatedThenChanged                // ip-masq generated it, and another program has changed it
	copiedByEarlierVersion              // it is the copy that an earlier version made
)

// makerOf returns who made a list that can be loaded. A list to which Multus delegates stays, so it does not
// matter who made that.
func (e Editor) makerOf(list config.Conflist) maker {
	isUsed := slices.Contains(e.Keep, filepath.Base(list.File))
	if isUsed {
		return madeByOthers
	}
	if readCopyRecord(e.CopyRecord).isCopy(list) {
		return copiedByEarlierVersion
	}
	record := readEntryRecord(e.RecordPath)
	if isKnownGenerated(list, record) {
		return generatedUnchanged
	}
	_, isRecorded := record.Generated[list.File]
	if isRecorded {
		return generatedThenChanged
	}
	if hasGeneratedForm(list) {
		return generatedPerhaps
	}
	return madeByOthers
}

// removePerhapsChanged removes a generated list without a record. An administrator may have changed it, so
// its text stays beside it: the other backups go with the dataDir.
func (e Editor) removePerhapsChanged(ctx context.Context, c Change, list config.Conflist) (Change, error) {
	kept, err := backupBeside(ctx, c.Path, list.Doc)
	if err != nil {
		return c, err
	}
	c, err = e.write(ctx, c, c.Path, list.Doc, nil)
	c.Backup = kept
	return c, err
}

// find returns the network that gets the entry. The copy that an earlier version made is no network.
func (e Editor) find() (Network, error) {
	c, err := config.ReadConfDir(e.Dir)
	lists := slices.DeleteFunc(slices.Clone(c.Conflists), readCopyRecord(e.CopyRecord).isCopy)
	n, err := find(e.Dir, e.Network, lists, c.Conflists, err)
	if err == nil && isGenerated(n.Conflist, readEntryRecord(e.RecordPath)) {
		n.Generated, n.Original = true, originalPath(n.Path)
	}
	return n, err
}
