// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ErrNotFirst reports that runtimes would not use ip-masq's own conflist.
var ErrNotFirst = errors.New("conflist.own: the runtime would not use ip-masq's own conflist, so none is written")

// ownNames returns the names of ip-masq's own conflist. The first that sorts before the main CNI plugin's file is used.
func ownNames() []string { return []string{"05-ip-masq.conflist", "00-ip-masq.conflist"} }

// ownConflist is what is known of ip-masq's own conflist: the main CNI plugin's file with the plugin entry.
type ownConflist struct {
	main   *Network            // the network by the main CNI plugin's file; nil without Editor.Own
	record *config.OwnConflist // what is on record
	others []config.Conflist   // files of ip-masq that it replaces, or all if there should be none
}

// isOwn reports whether a file is ip-masq's own conflist: by its name, and either by the record or because it is
// another file of the directory with the plugin entry. Any other file of that name belongs to an administrator.
func isOwn(list config.Conflist, lists []config.Conflist, record *config.OwnConflist) bool {
	if !slices.Contains(ownNames(), filepath.Base(list.File)) {
		return false
	}
	if record != nil && filepath.Dir(record.File) == filepath.Dir(list.File) && (record.File == list.File || record.Network == list.Network) {
		return true
	}
	text, err := withoutEntry(list)
	return err == nil && slices.ContainsFunc(lists, func(main config.Conflist) bool {
		copied, err := withoutEntry(main)
		return err == nil && main.File != list.File && bytes.Equal(text, copied)
	})
}

// withoutEntry returns the text of a file, as a list, without the plugin entry.
func withoutEntry(list config.Conflist) ([]byte, error) {
	if list.Err == nil && !list.IsList() {
		return listText(list), nil
	}
	return setEntry(list.File, list.Doc, nil, false)
}

// ownPath returns the path at which ip-masq's own conflist is the file that runtimes use, and the network's file the
// next one.
func ownPath(n Network, others []config.Conflist) (string, error) {
	const remedy = "or set own = false and manage = true in [conflist]"
	if n.Multus != nil || n.Conflist.IsMultus() {
		return "", fmt.Errorf("%w: the runtime uses network %s through Multus; remove Multus, %s", ErrNotFirst, policy.Quote(n.Name), remedy)
	}
	first, err := pick(others, "")
	if err != nil {
		return "", err
	}
	if first.Path != n.Path {
		return "", fmt.Errorf("%w: %s comes before the file of network %s; rename one of the two, %s",
			ErrNotFirst, policy.Printable(first.Path), policy.Quote(n.Name), remedy)
	}
	for _, name := range ownNames() {
		path := filepath.Join(filepath.Dir(n.Path), name)
		taken := func(l config.Conflist) bool { return l.File == path }
		if path < n.Path && !slices.ContainsFunc(others, taken) {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: %s sorts before %s; let the main CNI plugin write a file whose name begins with 10-, %s",
		ErrNotFirst, policy.Printable(n.Path), ownNames()[1], remedy)
}

// find returns the network that gets the entry. With Own, its path is that of ip-masq's own conflist, which was
// generated from the main CNI plugin's file.
func (e Editor) find() (Network, error) {
	record := config.ReadOwnConflist(e.OwnRecordPath)
	c, err := config.ReadConfDir(e.Dir)
	var own, lists []config.Conflist
	for _, l := range c.Conflists {
		if isOwn(l, c.Conflists, record) || e.Own && isGenerated(l) {
			own = append(own, l)
		} else {
			lists = append(lists, l)
		}
	}
	n, err := find(e.Dir, e.Network, lists, c.Conflists, err)
	if err != nil || !e.Own {
		n.own = ownConflist{record: record, others: own}
		return n, err
	}
	path, err := ownPath(n, lists)
	if err != nil {
		return Network{own: ownConflist{record: record}}, err // it stays as it is
	}
	copied := Network{Path: path, Name: n.Name, Generated: true, Original: n.Path, Conflist: config.Conflist{File: path}}
	copied.own = ownConflist{main: &n, record: record}
	for _, l := range own {
		if l.File == path {
			copied.Entries, copied.Conflist = len(l.Entries), l
		} else {
			copied.own.others = append(copied.own.others, l)
		}
	}
	return copied, nil
}

// ownText returns the text of ip-masq's own conflist: that of the main CNI plugin's file with the plugin entry.
func (n Network) ownText(entry []byte) ([]byte, error) {
	main := n.own.main
	if main.Single {
		return listOf(main.Path, main.Conflist.Doc, entry)
	}
	return setEntry(main.Path, main.Conflist.Doc, entry, true)
}

// insertOwn writes ip-masq's own conflist. The record says before that it is about to change, and after it of which text
// it is a copy: a process that is killed in between leaves one that counts as stale.
func (e Editor) insertOwn(ctx context.Context, c Change, n Network) (Change, error) {
	main := n.own.main
	if have := main.entryText(); have != nil && !e.FromFile {
		e.Entry = have
	}
	if have := n.entryText(); have != nil && !e.Replace {
		if e.FromFile {
			c.Differs = differences(have, e.Entry)
		}
		e.Entry = have
	}
	now, err := n.ownText(e.Entry)
	if err != nil {
		return c, err
	}
	own := config.OwnConflist{File: n.Path, Main: main.Path, Network: n.Name, Digest: config.DigestOf(main.Conflist.Doc)}
	recorded := n.own.record != nil && *n.own.record == own
	if recorded && bytes.Equal(n.Conflist.Doc, now) && len(n.own.others) == 0 {
		return c, nil
	}
	if !recorded {
		begun := own
		begun.Digest = ""
		isThere := n.own.record != nil && n.own.record.File == n.Path && n.Conflist.Doc != nil // and counts as stale anyway
		if err := e.recordOwn(ctx, &begun); err != nil && !isThere {
			return c, err
		}
	}
	if c, err = e.writeEntry(ctx, c, n, main.Path, n.Conflist.Doc, now); err != nil {
		return c, err
	}
	if err := e.recordOwn(ctx, &own); err != nil {
		c.RecordErr = err
	}
	c.Removed, err = e.removeOwn(ctx, n)
	return c, err
}

// recordOwn records ip-masq's own conflist, or with nil that there is none.
func (e Editor) recordOwn(ctx context.Context, own *config.OwnConflist) error {
	const op = "record ip-masq's own conflist"
	return e.record(ctx, e.OwnRecordPath, op, func() (any, bool) { return own, true })
}

func (e Editor) stale() error {
	own := config.ReadOwnConflist(e.OwnRecordPath)
	if own == nil {
		return nil
	}
	dir, _ := config.ReadConfDir(e.Dir) // the Manager reports the error
	return own.Stale(dir)
}

// removeOwn removes the files of ip-masq that another one replaces, or that have no main CNI plugin any more, except
// those to which Multus delegates.
func (e Editor) removeOwn(ctx context.Context, n Network) (removed []string, err error) {
	used := MultusFiles(e.Dir)
	for _, list := range n.own.others {
		if slices.Contains(used, filepath.Base(list.File)) {
			return removed, nil
		}
		if err := removeFile(ctx, list.File, list.Doc); err != nil {
			return removed, err
		}
		removed = append(removed, list.File)
	}
	if n.own.main != nil || n.own.record == nil {
		return removed, nil
	}
	return removed, e.recordOwn(ctx, nil)
}
