// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"reflect"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Place is where our entry belongs.
type Place struct {
	Dir     string // the configuration directory of the runtimes
	Network string // "" : the one that a runtime uses
	Entry   []byte // what is added where there is none
	// Backups is the directory for what the files were before; "" : none is kept.
	Backups string
	// Keep are the base names of lists that Withdraw leaves without an entry and does
	// not remove, as Multus delegates to them.
	Keep []string
	// Admits tells why the plugin would refuse the network's entry, whatever it
	// says, which would keep all pods from starting; nil admits any.
	Admits func(network string) error
}

// Change is what was done about a network.
type Change struct {
	Network string
	Path    string // the file that has, or had, the entry
	Wrote   bool
	Backup  string // of what Path was; "" where that was not written, or is new
	// Had is how many entries of ours the network had before.
	Had int
	// Stays is why Path, a list which FromConf made, stays without an entry; "" if
	// it does not.
	Stays string
}

// attempts is how often a file may change between reading and replacing before
// its writer is let be for now.
const attempts = 5

// Sync makes sure that the network has one entry of ours. It writes nothing
// where it has one already, and leaves that as it is. Of a single plugin's
// configuration it makes a list, which it keeps as the configuration has it. A list
// that was made of a configuration of Multus is removed: what Multus delegates to
// has the entry.
//
// Its errors are those of Find, Admits, config.ErrPosition, Add, FromConf, Backup and
// Replace; the file is as it was then. Where another process of ip-masq has a directory
// locked it waits until ctx ends at most.
func (p Place) Ensure(ctx context.Context) (Change, error) {
	return insist(func() (Change, error) { return p.ensure(ctx) })
}

// insist begins anew where a file has changed meanwhile.
func insist(change func() (Change, error)) (Change, error) {
	c, err := Change{}, ErrChanged
	for i := 0; i < attempts && errors.Is(err, ErrChanged); i++ {
		c, err = change()
	}
	return c, err
}

func (p Place) ensure(ctx context.Context) (Change, error) {
	n, err := Find(p.Dir, p.Network)
	if err != nil {
		return Change{}, err
	}
	c, err := p.ensureIn(ctx, n)
	if m := n.Multus; err == nil && m != nil && m.made {
		var gone Change
		gone, err = p.write(ctx, Change{Path: m.Path}, m.doc, nil)
		c.Wrote = c.Wrote || gone.Wrote
	}
	return c, err
}

func (p Place) ensureIn(ctx context.Context, n Network) (Change, error) {
	c := Change{Network: n.Name, Path: n.Path, Had: n.Entries}
	if p.Admits != nil {
		if err := p.Admits(n.Name); err != nil {
			return c, fmt.Errorf("%s: %w", policy.Printable(n.Path), err)
		}
	}
	switch {
	case n.position != nil:
		return c, n.position
	case n.isMultus: // and has the entry
		return c, nil
	case n.Single:
		return p.makeList(ctx, n)
	case n.Made && n.Original == "":
		// It would stand before the network of the next main plugin for ever.
		c, err := p.write(ctx, c, n.Doc, nil)
		if err == nil {
			return p.ensure(ctx)
		}
		return c, err
	case n.Made:
		return p.follow(ctx, n)
	}
	now, err := placed(n, p.Entry)
	if err != nil {
		return c, fmt.Errorf("%s: %w", policy.Printable(n.Path), err)
	}
	return p.write(ctx, c, n.Doc, now)
}

// placed returns the text of a list with one entry of ours. One in the folder of
// the network's name is one.
func placed(n Network, entry []byte) ([]byte, error) {
	inText, err := Present(n.Doc)
	if err != nil {
		return nil, err
	}
	var now []byte
	if n.Entries > inText {
		now, _, err = Remove(n.Doc)
	} else {
		now, _, err = Add(n.Doc, entry)
	}
	return now, err
}

// makeList makes the list of a single plugin's configuration.
func (p Place) makeList(ctx context.Context, n Network) (Change, error) {
	c := Change{Network: n.Name}
	now, err := FromConf(n.Doc, p.Entry)
	if err != nil {
		return c, fmt.Errorf("%s: %w", policy.Printable(n.Path), err)
	}
	if c.Path, err = ListPath(n.Path); err != nil {
		return c, err
	}
	if err := Create(ctx, c.Path, now, n.Path); err != nil {
		return c, err
	}
	c.Wrote = true
	return c, nil
}

// follow makes a list anew whose original has changed. Its entry stays.
func (p Place) follow(ctx context.Context, n Network) (Change, error) {
	c := Change{Network: n.Name, Path: n.Path, Had: n.Entries}
	conf, err := readFile(n.Original)
	if errors.Is(err, fs.ErrNotExist) {
		return c, ErrChanged
	}
	if err != nil {
		return c, err
	}
	entry, same, err := heldAgainst(n.Doc, conf)
	if err != nil {
		return c, fmt.Errorf("%s: %w", policy.Printable(n.Original), err)
	}
	if same && n.Entries == 1 {
		return c, nil
	}
	if entry == nil {
		entry = p.Entry
	}
	now, err := FromConf(conf, entry)
	if err != nil {
		return c, fmt.Errorf("%s: %w", policy.Printable(n.Original), err)
	}
	return p.write(ctx, c, n.Doc, now)
}

// heldAgainst returns the first entry of ours in a list that was made of a
// configuration, nil where there is none, and whether the rest is still what the
// configuration says.
func heldAgainst(doc, conf []byte) (entry []byte, same bool, err error) {
	t, err := read(doc)
	if err != nil {
		return nil, false, err
	}
	_, theirs, _, err := divide(doc)
	if err != nil {
		return nil, false, err
	}
	present, err := decode(conf)
	if err != nil {
		return nil, false, err
	}
	if len(t.ours) > 0 {
		entry = t.items[t.ours[0]].in(doc)
	}
	return entry, reflect.DeepEqual(theirs, []any{present}), nil
}

// write backs a file up, and puts another text in its place; nil removes it.
func (p Place) write(ctx context.Context, c Change, was, now []byte) (Change, error) {
	if now != nil && string(was) == string(now) {
		return c, nil
	}
	if p.Backups != "" {
		var err error
		if c.Backup, err = Backup(ctx, p.Backups, c.Path, was); err != nil {
			return c, err
		}
	}
	var err error
	if now == nil {
		err = Delete(ctx, c.Path, was)
	} else {
		err = Replace(ctx, c.Path, was, now)
	}
	c.Wrote = err == nil
	return c, err
}
