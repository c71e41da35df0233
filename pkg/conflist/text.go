// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// maxSize is the size, in bytes, above which files are neither read nor written.
const maxSize = 1 << 20

// ErrOnlyPlugin reports that a list would have no plugin left, which no runtime loads.
var ErrOnlyPlugin = errors.New("the plugin entry is the only plugin of the list; remove the file instead")

// ReadEntry reads the file of the entry to insert. One that the plugin refuses in any network is an error.
func ReadEntry(path string) ([]byte, error) {
	entry, _, err := safefile.ReadFile(path, maxSize)
	if err != nil {
		return nil, err
	}
	if err := checkEntry(entry, "anynetwork", "1.0.0"); err != nil {
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), err)
	}
	return entry, nil
}

// checkEntry returns why the plugin would refuse an entry in a network: it would fail every ADD.
func checkEntry(entry []byte, network, cniVersion string) error {
	written := config.ReadNetconf(entry)
	if err := written.Err(); err != nil {
		return err
	}
	switch string(written.Value("type")) {
	case `"` + config.PluginType + `"`:
	case "":
		return fmt.Errorf(`type: is missing; write "type": %q`, config.PluginType)
	default:
		return fmt.Errorf("type: must be %q", config.PluginType)
	}
	handed, err := config.NetconfInList(entry, network, cniVersion)
	if err = cmp.Or(config.ParseConflist("", entry).Err, err); err == nil { // runtimes read it first
		_, err = handed.Entry()
	}
	return err
}

// setEntry returns the text of a list with exactly one plugin entry or, if entry is nil, with none. An entry
// that is there stays, unless it is to be replaced; of several, the first stays. All other bytes stay. A
// single plugin's configuration becomes a list with its name and CNI version, as in libcni's
// ConfListFromConf.
func setEntry(path string, doc, entry []byte, replace bool) ([]byte, error) {
	list := config.ParseConflist(path, doc)
	if list.Err == nil && !list.IsList() {
		if len(list.Entries) > 0 {
			return nil, fmt.Errorf("%s: %w", policy.Printable(path), ErrOnlyPlugin)
		}
		if list.Network == "" {
			return nil, fmt.Errorf("%s: name: is missing; write the network's", policy.Printable(path))
		}
		path, doc = generatedPath(path), listOfSingle(list)
		list = config.ParseConflist(path, doc)
	}
	if list.Err != nil {
		return nil, list.Err
	}
	var plugins []span
	for _, plugin := range list.Plugins {
		from := offsetIn(doc, plugin)
		plugins = append(plugins, span{from, from + len(plugin)})
	}
	var now []byte
	present, entries := list.Entries, 1
	switch {
	case entry == nil && len(present) == 0, entry != nil && len(present) == 1 && !replace:
		return doc, nil
	case entry == nil && len(present) == len(plugins):
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), ErrOnlyPlugin)
	case entry == nil:
		now, entries = remove(doc, plugins, present), 0
	case len(present) > 1:
		now = remove(doc, plugins, present[1:])
	default:
		if err := checkEntry(entry, list.Network, list.CNIVersion); err != nil {
			return nil, fmt.Errorf("the plugin entry for %s: %w", policy.Printable(path), err)
		}
		if len(present) == 0 {
			now = insert(doc, plugins, entry)
			break
		}
		at := plugins[present[0].Index]
		now = slices.Concat(doc[:at.from], indented(entry, spaceBefore(doc, at)), doc[at.to:])
	}
	if err := verify(list, now, entries); err != nil {
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), err)
	}
	return now, nil
}

// offsetIn returns where in doc a part of it begins. Both slices reach to the end of the same array, so their
// capacities differ by what is before the part. A search would find an equal text in another place, too.
func offsetIn(doc, part []byte) int { return cap(doc) - cap(part) }

// verify returns an error unless a new text of a list has the same other plugins, and so many plugin entries.
func verify(before config.Conflist, now []byte, entries int) error {
	after := config.ParseConflist(before.File, now)
	if after.Err != nil {
		return fmt.Errorf("the new text: %w", after.Err)
	}
	if len(after.Entries) != entries || !slices.EqualFunc(otherPlugins(before), otherPlugins(after), bytes.Equal) {
		return errors.New("the new text differs in more than the plugin entry")
	}
	return nil
}

func otherPlugins(list config.Conflist) (others [][]byte) {
	for i, plugin := range list.Plugins {
		if list.Types[i] != config.PluginType {
			others = append(others, plugin)
		}
	}
	return others
}

type span struct{ from, to int }

// insert inserts an entry behind the last plugin, with the space that is before that.
func insert(doc []byte, plugins []span, entry []byte) []byte {
	last := plugins[len(plugins)-1]
	space := spaceBefore(doc, last)
	return slices.Concat(doc[:last.to], []byte(","), space, indented(entry, space), doc[last.to:])
}

func spaceBefore(doc []byte, at span) []byte {
	before := doc[:at.from]
	return before[len(bytes.TrimRight(before, " \t\n\r")):]
}

// indented returns an entry whose lines have the indentation that ends the space before it.
func indented(entry, space []byte) []byte {
	text := bytes.TrimSpace(entry)
	if i := bytes.LastIndexByte(space, '\n'); i >= 0 {
		text = bytes.ReplaceAll(text, []byte("\n"), space[i:])
	}
	return text
}

// remove removes plugins, at least one of which stays, with what separates each from the plugin
// before it, or, at the beginning of the list, from the one behind it.
func remove(doc []byte, plugins []span, gone []config.ConflistEntry) []byte {
	var now []byte
	at := 0
	for i, e := range gone {
		cut := plugins[e.Index]
		if i == e.Index { // all before it are removed too
			cut.to = plugins[e.Index+1].from
		} else {
			cut.from = plugins[e.Index-1].to
		}
		now = append(now, doc[at:cut.from]...)
		at = cut.to
	}
	return append(now, doc[at:]...)
}
