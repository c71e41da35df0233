// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"errors"
	"fmt"
	"slices"
)

// ErrOnlyPlugin says that a list would have no plugin left, which no runtime
// loads.
var ErrOnlyPlugin = errors.New("ours is the only plugin of the list; remove the file instead")

// ErrElsewhere says that a list has no plugins in its text: libcni takes them
// from a folder of the network's name, and would run an entry in the text first.
var ErrElsewhere = errors.New("the list has no plugins of its own; write our entry to a file that sorts last " +
	"in the folder of the network's name")

// Present returns how many entries of ours the text of a list has. An entry that
// the plugin would refuse is one. Those in a folder of the network's name, which
// libcni reads too, are not counted.
func Present(doc []byte) (int, error) {
	list, err := parseList(doc)
	if err != nil {
		return 0, fmt.Errorf("read the conflist: %w", err)
	}
	return len(list.ours()), nil
}

// Add puts an entry behind the plugins of a list's text, laid out as its
// neighbour is. An entry of ours that is there already stays as and where it is;
// of several the first stays and the others go. It reports whether anything was
// changed; what it returns is new, or the text itself.
//
// The entry must be one that the plugin accepts in that network.
func Add(doc, entry []byte) ([]byte, bool, error) {
	const op = "add our entry to the conflist"
	t, err := read(doc)
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", op, err)
	}
	if n := len(t.ours); n > 0 {
		if n == 1 {
			return doc, false, nil
		}
		first := t.items[t.ours[0]].in(doc)
		now := t.without(t.ours[1:])
		if err := verify(doc, now, first); err != nil {
			return nil, false, fmt.Errorf("%s: %w", op, err)
		}
		return now, true, nil
	}
	if err := checkEntry(entry, t.list.name, t.list.cniVersion); err != nil {
		return nil, false, fmt.Errorf("%s: the entry: %w", op, err)
	}
	now := t.with(entry)
	if err := verify(doc, now, entry); err != nil {
		return nil, false, fmt.Errorf("%s: %w", op, err)
	}
	return now, true, nil
}

// Remove takes all our entries out of a list's text. It reports whether there
// were any; what it returns is new, or the text itself. ErrOnlyPlugin is that of
// a list that has nothing else.
func Remove(doc []byte) ([]byte, bool, error) {
	const op = "remove our entry from the conflist"
	t, err := read(doc)
	switch {
	case errors.Is(err, ErrElsewhere):
		return doc, false, nil
	case err != nil:
		return nil, false, fmt.Errorf("%s: %w", op, err)
	case len(t.ours) == 0:
		return doc, false, nil
	case len(t.ours) == len(t.items):
		return nil, false, fmt.Errorf("%s: %w", op, ErrOnlyPlugin)
	}
	now := t.without(t.ours)
	if err := verify(doc, now); err != nil {
		return nil, false, fmt.Errorf("%s: %w", op, err)
	}
	return now, true, nil
}

// text is a list's text, and where its plugins stand in it.
type text struct {
	doc     []byte
	list    loaded
	plugins span
	items   []span
	ours    []int // of the items
}

func read(doc []byte) (text, error) {
	list, err := parseList(doc)
	if err != nil {
		return text{}, err
	}
	plugins, there := value(doc, whole(doc), "plugins")
	if !there {
		return text{}, ErrElsewhere
	}
	t := text{doc: doc, list: list, plugins: plugins, items: parts(doc, plugins), ours: list.ours()}
	if len(t.items) != len(list.plugins) {
		return text{}, errors.New("plugins: is read in two ways")
	}
	return t, nil
}

// with returns the text with an entry behind the last plugin. What stands
// between the last two comes between the last and the entry.
func (t text) with(entry []byte) []byte {
	last := t.items[len(t.items)-1]
	s := styleOf(t.doc, last)
	var between []byte
	if n := len(t.items); n > 1 {
		between = t.doc[t.items[n-2].to:last.from]
	} else {
		between = append([]byte{','}, t.doc[t.plugins.from+1:last.from]...)
		if len(between) == 1 && s.newline != "" {
			between = []byte(", ")
		}
	}
	return slices.Concat(t.doc[:last.to], between, s.layOut(entry), t.doc[last.to:])
}

// without returns the text without some of the items, of which one at least
// stays. An item goes with what stands between it and the one before it; those
// that the list begins with go with what stands behind them.
func (t text) without(gone []int) []byte {
	var now []byte
	at := 0
	for i, item := range t.items {
		if !slices.Contains(gone, i) {
			continue
		}
		cut := span{to: item.to}
		if leading := i < len(gone) && gone[i] == i; leading {
			cut = span{item.from, t.items[i+1].from}
		} else {
			cut.from = t.items[i-1].to
		}
		now = append(now, t.doc[at:cut.from]...)
		at = cut.to
	}
	return append(now, t.doc[at:]...)
}
