// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// DefaultEntry is the plugin entry that is inserted if no file has another one.
const DefaultEntry = `{"type":"` + config.PluginType + `"}`

// maxSize is the size, in bytes, above which files are neither read nor written.
const maxSize = 1 << 20

var (
	// ErrOnlyPlugin says that a list would have no plugin left, which no runtime loads.
	ErrOnlyPlugin = errors.New("the plugin entry is the only plugin of the list; remove the file instead")
	// ErrElsewhere says that a list has no plugins in its text: libcni takes them from a folder of
	// the network's name, and would run an entry in the text first.
	ErrElsewhere = errors.New("the list has no plugins of its own; write the plugin entry to a file that sorts last " +
		"in the folder of the network's name")
)

// ReadEntry reads the file of the plugin entry that is to be inserted; DefaultEntry if there is no
// file. An entry that the plugin would refuse in any network is an error.
func ReadEntry(path string) ([]byte, error) {
	entry, _, err := safefile.ReadFile(path, maxSize)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return []byte(DefaultEntry), nil
	case err != nil:
		return nil, err
	}
	const network, cniVersion = "network", "1.0.0" // any will do
	if err := checkEntry(entry, network, cniVersion); err != nil {
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), err)
	}
	return entry, nil
}

// checkEntry returns why the plugin would refuse an entry in a network: it would fail every ADD.
func checkEntry(entry []byte, network, cniVersion string) error {
	if _, err := config.ParseEntry(entry); errors.Is(err, config.ErrNotJSON) {
		return err
	}
	var values map[string]any
	if err := json.Unmarshal(entry, &values); err != nil || values == nil {
		return errors.New("is not an object; write one, in braces")
	}
	if values["type"] != config.PluginType {
		return fmt.Errorf("type: must be %q", config.PluginType)
	}
	values["name"], values["cniVersion"] = network, cniVersion
	netconf, err := json.Marshal(values)
	if err != nil {
		return fmt.Errorf("encode: %s", policy.Printable(err.Error()))
	}
	_, err = config.ParseEntry(netconf)
	return err
}

// setEntry returns the text of a list with exactly one plugin entry or, if entry is nil, with none.
// An entry that is there already stays as it is; of several, which would all run on each ADD, the
// first stays. All other bytes stay.
func setEntry(path string, doc, entry []byte) ([]byte, error) {
	list, err := parse(path, doc)
	if err != nil {
		return nil, err
	}
	if len(list.Types) == 0 && entry == nil {
		return doc, nil
	}
	plugins, err := pluginSpans(doc)
	if err == nil && len(plugins) != len(list.Types) {
		err = errors.New("plugins: is ambiguous; write the key once")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), err)
	}
	if len(plugins) == 0 {
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), ErrElsewhere)
	}
	var extra []int // entries to remove
	for _, e := range list.Entries {
		extra = append(extra, e.Index)
	}
	if entry != nil && len(extra) > 0 {
		extra, entry = extra[1:], nil
	}
	switch {
	case len(extra) == 0 && entry == nil:
		return doc, nil
	case len(extra) == len(plugins):
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), ErrOnlyPlugin)
	case entry == nil:
		return verified(path, list, doc, remove(doc, plugins, extra), nil, len(list.Entries)-len(extra))
	}
	if err := checkEntry(entry, list.Network, list.CNIVersion); err != nil {
		return nil, fmt.Errorf("the plugin entry for %s: %w", policy.Printable(path), err)
	}
	return verified(path, list, doc, insert(doc, plugins, entry), entry, 1)
}

// verified returns the new text of a list unless something else than the plugin entries differs
// from the text before, or an entry is not the given one. Without a given entry, those left stay.
func verified(path string, before config.Conflist, was, now, entry []byte, entries int) ([]byte, error) {
	after, err := parse(path, now)
	if err == nil {
		var around, others, aroundNow, othersNow any
		if around, others, err = withoutEntries(before, was); err == nil {
			aroundNow, othersNow, err = withoutEntries(after, now)
		}
		if err == nil && (len(after.Entries) != entries || !reflect.DeepEqual(around, aroundNow) || !reflect.DeepEqual(others, othersNow)) {
			err = errors.New("the new text differs in more than the plugin entry")
		}
	}
	if err == nil && entry != nil {
		var want, have any
		err = errors.Join(decode(entry, &want), decode(after.Plugins[after.Entries[0].Index], &have))
		if err == nil && !reflect.DeepEqual(want, have) {
			err = errors.New("the new text has another plugin entry than the one to be inserted")
		}
	}
	if err != nil {
		return nil, fmt.Errorf("edit %s: %w", policy.Printable(path), err)
	}
	return now, nil
}

// withoutEntries returns what a list's text has around its plugins, and the plugins of others.
func withoutEntries(list config.Conflist, doc []byte) (around, others any, err error) {
	var all map[string]any
	if err := decode(doc, &all); err != nil {
		return nil, nil, err
	}
	plugins, _ := all["plugins"].([]any)
	delete(all, "plugins")
	if len(plugins) != len(list.Types) {
		return nil, nil, errors.New("plugins: is ambiguous; write the key once")
	}
	kept := []any{}
	for i, p := range plugins {
		if list.Types[i] != config.PluginType {
			kept = append(kept, p)
		}
	}
	return all, kept, nil
}

// decode decodes JSON and keeps numbers as they are written.
func decode(doc []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(doc))
	d.UseNumber()
	return d.Decode(into)
}

// parse parses the text of a file as the runtime that loads it.
func parse(path string, doc []byte) (config.Conflist, error) {
	if len(doc) > maxSize {
		return config.Conflist{}, fmt.Errorf("%s: larger than %d KiB", policy.Printable(path), maxSize>>10)
	}
	return config.ParseConflist(path, doc)
}

// span is where a value stands in a text.
type span struct{ from, to int }

// pluginSpans returns where the items of the list "plugins" stand. Of a key that comes twice the last
// counts, as for libcni.
func pluginSpans(doc []byte) ([]span, error) {
	var plugins []span
	members := json.NewDecoder(bytes.NewReader(doc))
	if _, err := members.Token(); err != nil { // the opening brace
		return nil, err
	}
	for members.More() {
		key, err := members.Token()
		var value json.RawMessage
		if err = errors.Join(err, members.Decode(&value)); err != nil {
			return nil, err
		}
		if key != "plugins" || value[0] != '[' {
			continue
		}
		plugins = nil
		start := int(members.InputOffset()) - len(value)
		items := json.NewDecoder(bytes.NewReader(value))
		_, err = items.Token()
		for err == nil && items.More() {
			var item json.RawMessage
			err = items.Decode(&item)
			end := start + int(items.InputOffset())
			plugins = append(plugins, span{end - len(item), end})
		}
		if err != nil {
			return nil, err
		}
	}
	return plugins, nil
}

// insert inserts an entry behind the last plugin, with what separates the last two plugins. The
// lines of the entry get the indentation of the last plugin.
func insert(doc []byte, plugins []span, entry []byte) []byte {
	last := plugins[len(plugins)-1]
	var separator []byte
	if n := len(plugins); n > 1 {
		separator = doc[plugins[n-2].to:last.from]
	} else {
		bracket := bytes.LastIndexByte(doc[:last.from], '[')
		separator = slices.Concat([]byte(","), doc[bracket+1:last.from])
	}
	text := bytes.TrimSpace(entry)
	_, space, _ := bytes.Cut(separator, []byte(","))
	if i := bytes.LastIndexByte(space, '\n'); i >= 0 {
		text = bytes.ReplaceAll(text, []byte("\n"), space[i:])
	}
	return slices.Concat(doc[:last.to], separator, text, doc[last.to:])
}

// remove removes plugins, at least one of which stays, with what separates each from the plugin
// before it, or, at the beginning of the list, from the one behind it.
func remove(doc []byte, plugins []span, gone []int) []byte {
	var now []byte
	at := 0
	for i, index := range gone {
		cut := span{to: plugins[index].to}
		if i == index { // all before it are removed too
			cut = span{plugins[index].from, plugins[index+1].from}
		} else {
			cut.from = plugins[index-1].to
		}
		now = append(now, doc[at:cut.from]...)
		at = cut.to
	}
	return append(now, doc[at:]...)
}

// loadable returns why no runtime would load a text from a file of that name.
func loadable(path string, doc []byte) error {
	list, err := parse(path, doc)
	if err == nil && len(list.Types) == 0 {
		err = fmt.Errorf("%s: %w", policy.Printable(path), ErrElsewhere)
	}
	if err != nil {
		return fmt.Errorf("the new text: %w", err)
	}
	return nil
}

// listOf returns the text of a list of a single plugin's configuration and the plugin entry. The list
// gets the configuration's name and CNI version, which the configuration keeps, as in libcni's
// ConfListFromConf.
func listOf(path string, doc, entry []byte) ([]byte, error) {
	conf, err := parse(path, doc)
	switch {
	case err != nil:
		return nil, err
	case len(conf.Entries) > 0:
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), ErrOnlyPlugin)
	case conf.Network == "":
		return nil, fmt.Errorf("%s: name: is missing; write the network's", policy.Printable(path))
	}
	head, err := json.Marshal(struct {
		Name       string `json:"name"`
		CNIVersion string `json:"cniVersion,omitempty"`
	}{conf.Network, conf.CNIVersion})
	if err != nil {
		return nil, fmt.Errorf("encode: %s", policy.Printable(err.Error()))
	}
	text := slices.Concat(head[:len(head)-1], []byte(",\"plugins\":[\n"), bytes.TrimSpace(doc), []byte("\n]}\n"))
	return setEntry(strings.TrimSuffix(path, filepath.Ext(path))+generatedSuffix, text, entry)
}

// entryOf returns the plugin entry of a generated list, nil if it has none, and whether the list still
// has the text of the configuration that it was made of.
func entryOf(list config.Conflist, conf []byte) (entry []byte, current bool, err error) {
	spans, err := pluginSpans(list.Doc)
	for i, s := range spans {
		text := list.Doc[s.from:s.to]
		isEntry := slices.ContainsFunc(list.Entries, func(e config.ConflistEntry) bool { return e.Index == i })
		switch {
		case !isEntry:
			current = bytes.Equal(text, bytes.TrimSpace(conf))
		case entry == nil:
			entry = text
		}
	}
	return entry, current, err
}
