// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"encoding/json"
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
	kind := string(written.Value("type"))
	if kind == "" {
		return fmt.Errorf(`type: is missing; write "type": %q`, config.PluginType)
	}
	if kind != `"`+config.PluginType+`"` {
		return fmt.Errorf("type: must be %q", config.PluginType)
	}
	if err := config.ParseConflist("", entry).Err; err != nil { // runtimes read it first
		return err
	}
	handed, err := config.NetconfInList(entry, network, cniVersion)
	if err != nil {
		return err
	}
	_, err = handed.Entry()
	return err
}

// setEntry returns the text of a list with exactly one plugin entry or, if entry is nil, with none. An
// entry that is there stays, unless it is to be replaced; of several, the others are removed. All other
// bytes stay. A single plugin's configuration becomes a list. Text is inserted and cut, and nothing is
// formatted: a program that decodes and encodes the file would change numbers beyond float64, the order of
// keys, and what people read.
func setEntry(path string, doc, entry []byte, replace bool) ([]byte, error) {
	list, err := asList(config.ParseConflist(path, doc))
	if err != nil {
		return nil, err
	}
	var now []byte
	entries := 1
	if entry == nil {
		entries = 0
		now, err = withoutEntries(list)
	} else {
		now, err = withEntry(list, entry, replace)
	}
	if err != nil {
		return nil, err
	}
	if err := verify(list, now, entries); err != nil {
		return nil, fmt.Errorf("%s: %w", policy.Printable(list.File), err)
	}
	return now, nil
}

// asList returns a list as it is, and a single plugin's configuration as the list that is generated from it.
func asList(list config.Conflist) (config.Conflist, error) {
	if list.Err != nil {
		return list, list.Err
	}
	if list.IsList() {
		return list, nil
	}
	if len(list.Entries) > 0 {
		return list, fmt.Errorf("%s: %w", policy.Printable(list.File), ErrOnlyPlugin)
	}
	if list.Network == "" {
		return list, fmt.Errorf("%s: name: is missing; write the network's", policy.Printable(list.File))
	}
	list = config.ParseConflist(generatedPath(list.File), listOfSingle(list))
	return list, list.Err
}

// withoutEntries returns the text without the plugin entries.
func withoutEntries(list config.Conflist) ([]byte, error) {
	if len(list.Entries) == 0 {
		return list.Doc, nil
	}
	plugins, err := pluginSpans(list)
	if err != nil {
		return nil, err
	}
	if len(list.Entries) == len(plugins) {
		return nil, fmt.Errorf("%s: %w", policy.Printable(list.File), ErrOnlyPlugin)
	}
	return remove(list.Doc, plugins, list.Entries), nil
}

// withEntry returns the text with one entry, in the place of the first that is there, or behind the last
// plugin.
func withEntry(list config.Conflist, entry []byte, replace bool) ([]byte, error) {
	had := len(list.Entries)
	if had == 1 && !replace {
		return list.Doc, nil
	}
	plugins, err := pluginSpans(list)
	if err != nil {
		return nil, err
	}
	if had > 0 && !replace {
		return remove(list.Doc, plugins, list.Entries[1:]), nil
	}
	if err := checkEntry(entry, list.Network, list.CNIVersion); err != nil {
		return nil, fmt.Errorf("the plugin entry for %s: %w", policy.Printable(list.File), err)
	}
	if had == 0 {
		return insert(list.Doc, plugins, entry), nil
	}
	// The others are behind the first, whose place in the text stays.
	text := remove(list.Doc, plugins, list.Entries[1:])
	at := plugins[list.Entries[0].Index]
	now := indented(entry, spaceBefore(text, at))
	return slices.Concat(text[:at.from], now, text[at.to:]), nil
}

// pluginSpans returns where each plugin stands in the text of a list. A search for the text of a plugin would
// find an equal text in another place, too.
func pluginSpans(list config.Conflist) ([]span, error) {
	array, from, err := findPlugins(list.Doc)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", policy.Printable(list.File), err)
	}
	spans, err := itemSpans(array, from)
	if err == nil && len(spans) != len(list.Plugins) {
		err = fmt.Errorf("%d are in the text, and %d were read from it", len(spans), len(list.Plugins))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: plugins: %w", policy.Printable(list.File), err)
	}
	return spans, nil
}

// findPlugins returns the array of plugins and where it begins. Of two equal keys the last one counts, as in
// libcni.
func findPlugins(doc []byte) (array json.RawMessage, from int, err error) {
	decoder := json.NewDecoder(bytes.NewReader(doc))
	if _, err := decoder.Token(); err != nil { // the brace
		return nil, 0, err
	}
	for decoder.More() {
		key, err := decoder.Token()
		if err != nil {
			return nil, 0, err
		}
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return nil, 0, err
		}
		if key == "plugins" {
			array, from = value, int(decoder.InputOffset())-len(value)
		}
	}
	return array, from, nil
}

// itemSpans returns where the items of an array stand in the text that has it at an offset.
func itemSpans(array json.RawMessage, offset int) ([]span, error) {
	decoder := json.NewDecoder(bytes.NewReader(array))
	if _, err := decoder.Token(); err != nil { // the bracket
		return nil, err
	}
	var spans []span
	for decoder.More() {
		var item json.RawMessage
		if err := decoder.Decode(&item); err != nil {
			return nil, err
		}
		to := offset + int(decoder.InputOffset())
		spans = append(spans, span{to - len(item), to})
	}
	return spans, nil
}

// verify returns an error unless a new text of a list has the same other plugins, and so many plugin entries.
func verify(before config.Conflist, now []byte, entries int) error {
	after := config.ParseConflist(before.File, now)
	if after.Err != nil {
		return fmt.Errorf("the new text: %w", after.Err)
	}
	hasSameOthers := slices.EqualFunc(otherPlugins(before), otherPlugins(after), bytes.Equal)
	if len(after.Entries) != entries || !hasSameOthers {
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
