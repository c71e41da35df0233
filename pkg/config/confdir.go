// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ConfDir is the content of the CNI configuration directory.
type ConfDir struct {
	Dir       string
	Conflists []Conflist // sorted by file name: runtimes use the first
	// Changed is when a file was last added, removed or written.
	Changed time.Time

	naming map[string]*Conflist // by network, the first with a plugin entry
	err    error                // of the files that runtimes cannot load
}

// Conflist is one file of the directory. If runtimes cannot load it, it has an Err and
// neither Types, Plugins nor Entries.
type Conflist struct {
	File       string   // the path
	Doc        []byte   // the text
	Network    string   // "" for the configuration of a single plugin without a name
	CNIVersion string   // as stated; a list with cniVersions may get another one
	Types      []string // of all plugins, in order
	Plugins    []json.RawMessage
	Entries    []ConflistEntry // the plugin entries
	Err        error

	inlineOnly bool // no plugins are in a folder of the network's name
}

// ConflistEntry is one plugin entry. Its Err is not the list's: runtimes load the list, and
// the plugin refuses the entry.
type ConflistEntry struct {
	Index   int // among the plugins of the list
	Netconf Netconf
	Entry   Entry
	Err     error
}

// IsMultus reports whether a plugin is Multus, thin or thick. It delegates to another network.
func IsMultus(plugin string) bool { return plugin == "multus" || plugin == "multus-shim" }

// IsMultus reports whether the network's main plugin is Multus.
func (l Conflist) IsMultus() bool { return len(l.Types) > 0 && IsMultus(l.Types[0]) }

// ErrPosition reports a plugin entry without a plugin before it: every ADD fails, because no
// plugin has created an interface.
var ErrPosition = errors.New("stands where every ADD fails")

// PositionErr returns an ErrPosition, or nil if the plugin entry follows another plugin or is
// missing.
func (l Conflist) PositionErr() error {
	if len(l.Entries) == 0 || l.Entries[0].Index > 0 {
		return nil
	}
	file := policy.Printable(l.File)
	if len(l.Types) == len(l.Entries) {
		return fmt.Errorf("%s: plugins: the plugin entry of network %s %w, alone: "+
			"write it behind the plugin that makes the interface, or remove the file", file, policy.Quote(l.Network), ErrPosition)
	}
	return fmt.Errorf("%s: plugins[0]: the plugin entry of network %s %w, first: "+
		"move it behind the plugin that makes the interface", file, policy.Quote(l.Network), ErrPosition)
}

// DataDirErr returns an error if ADDs fail because a plugin entry has another dataDir than
// the reconciler, and no plugin.toml states one for all.
func (l Conflist) DataDirErr(guard PluginFile, reconcilers string) error {
	for _, e := range l.Entries {
		if e.Err == nil && !guard.Present && e.Entry.DataDir != reconcilers {
			return fmt.Errorf("%s: plugins[%d]: dataDir: %s is not the reconciler's data_dir, %s; a node has one dataDir: state the same in both",
				policy.Printable(l.File), e.Index, policy.Quote(e.Entry.DataDir), policy.Quote(reconcilers))
		}
	}
	return nil
}

// CheckPlugin returns an error if runtimes cannot run the plugin from the directory.
func CheckPlugin(dir string) error {
	path := filepath.Join(dir, PluginType)
	const anyExecute = 0o111
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s is missing", policy.Printable(path))
	case err != nil:
		return fmt.Errorf("look at %s: %w", policy.Printable(path), Bare(err))
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is not a regular file", policy.Printable(path))
	case info.Mode().Perm()&anyExecute == 0:
		return fmt.Errorf("%s is not executable (mode %04o)", policy.Printable(path), info.Mode().Perm())
	}
	return nil
}

// ReadConfDir reads the files that runtimes take for configurations (.conf, .conflist,
// .json), as libcni does. A file that cannot be loaded has an error of its own. The returned
// error is about the directory; it is an fs.ErrNotExist if there is none.
func ReadConfDir(dir string) (ConfDir, error) {
	c := ConfDir{Dir: dir}
	names, err := filesIn(dir, ".conf", ".conflist", ".json")
	if err != nil {
		return c, fmt.Errorf("read the CNI configuration directory %s: %w", policy.Printable(dir), err)
	}
	c.Changed = lastChange(dir, names)
	for _, name := range names {
		list, err := readConflist(filepath.Join(dir, name))
		if errors.Is(err, errGone) {
			continue
		}
		list.Err = err
		c.Conflists = append(c.Conflists, list)
	}
	c.index()
	return c, nil
}

func (c *ConfDir) index() {
	c.naming = map[string]*Conflist{}
	var broken DocumentError
	for i := range c.Conflists {
		list := &c.Conflists[i]
		if list.Err != nil {
			broken.Mistakes = append(broken.Mistakes, list.Err)
		}
		if list.Network != "" && len(list.Entries) > 0 && c.naming[list.Network] == nil {
			c.naming[list.Network] = list
		}
	}
	if len(broken.Mistakes) > 0 {
		c.err = &broken
	}
}

// lastChange returns the latest modification time of the directory and its files. A removed
// file changes that of the directory.
func lastChange(dir string, names []string) time.Time {
	var last time.Time
	for _, name := range append([]string{"."}, names...) {
		if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.ModTime().After(last) {
			last = info.ModTime()
		}
	}
	return last
}

// HasEntry reports whether a conflist has a plugin entry for the network, valid or not.
func (c ConfDir) HasEntry(network string) bool { return c.first(network) != nil }

// Policy returns the policy in the first plugin entry of the first conflist of the network
// that has one. It is false if there is none, or if that entry is not valid.
func (c ConfDir) Policy(network string) (policy.SourcePolicy, bool) {
	e := c.first(network)
	if e == nil || e.Err != nil {
		return policy.SourcePolicy{}, false
	}
	return e.Entry.Policy, true
}

// LacksEntry reports whether no conflist has a plugin entry for the network. That is unknown while
// a file cannot be loaded.
func (c ConfDir) LacksEntry(network string) bool { return c.Err() == nil && !c.HasEntry(network) }

// HasEntryWith reports whether Policy returns this policy.
func (c ConfDir) HasEntryWith(network string, s policy.SourcePolicy) bool {
	onDisk, found := c.Policy(network)
	return found && onDisk.Equal(s)
}

// Err returns the errors of the files that runtimes cannot load. While there are any, not all
// networks are known.
func (c ConfDir) Err() error { return c.err }

func (c ConfDir) first(network string) *ConflistEntry {
	if list := c.naming[network]; list != nil {
		return &list.Entries[0]
	}
	return nil
}

// filesIn returns the sorted names of the files with one of the extensions.
func filesIn(dir string, extensions ...string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, Bare(err)
	}
	var names []string
	for _, e := range entries {
		if !e.IsDir() && slices.Contains(extensions, filepath.Ext(e.Name())) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// errGone reports a file that was removed since its directory was read.
var errGone = errors.New("is gone")

func readConfFile(path string) ([]byte, error) {
	const mostKiB = 1024
	doc, err := readFile(path, mostKiB)
	if missing(path, err) {
		return nil, errGone
	}
	return doc, err
}

// plugin is the configuration of one plugin and the file that it is in.
type plugin struct {
	types.PluginConf
	doc  []byte
	file string
}

// readConflist reads a file, and the folder of plugin configurations that belongs to it
// (libcni 1.3 and later).
func readConflist(path string) (Conflist, error) {
	doc, err := readConfFile(path)
	if err != nil {
		return Conflist{File: path}, err
	}
	list, plugins, err := parseConflist(path, doc)
	if err == nil && !list.inlineOnly {
		var more []plugin
		if more, err = readPluginFolder(filepath.Join(filepath.Dir(path), list.Network)); err != nil {
			err = fmt.Errorf("%s: %w", policy.Printable(path), err)
		}
		plugins = append(plugins, more...)
	}
	if err == nil && len(plugins) == 0 {
		err = fmt.Errorf("%s: plugins: is missing; write a list of plugin configurations", policy.Printable(path))
	}
	if err == nil {
		list.add(plugins)
	}
	return list, err
}

// ParseConflist parses the text of a file as ReadConfDir does, but without the folder of the
// network's name: a list may have no plugins of its own.
func ParseConflist(path string, doc []byte) (Conflist, error) {
	list, plugins, err := parseConflist(path, doc)
	if err == nil {
		list.add(plugins)
	}
	return list, err
}

// parseConflist parses a file as libcni does: by its extension a list, or the configuration
// of a single plugin. In a list the last of two equal keys counts, and unknown keys are
// ignored. (libcni itself would bring OpenTelemetry into the plugin.)
func parseConflist(path string, doc []byte) (Conflist, []plugin, error) {
	conf := Conflist{File: path, Doc: doc, inlineOnly: true}
	if filepath.Ext(path) != ".conflist" {
		p, err := parsePlugin(path, doc)
		if err != nil {
			return conf, nil, fmt.Errorf("%s: %w", policy.Printable(path), err)
		}
		conf.Network, conf.CNIVersion = p.Name, p.CNIVersion
		return conf, []plugin{p}, nil
	}
	var values map[string]json.RawMessage
	if err := unmarshal(doc, &values); err != nil {
		return conf, nil, fmt.Errorf("%s: %w", policy.Printable(path), err)
	}
	var plugins []plugin
	var versions []string // libcni chooses one; no policy depends on it
	var ignored bool
	conf.inlineOnly = false
	d := Document{File: path}
	for _, k := range []Key{
		{Name: "name", Value: networkName(&conf.Network)},
		{Name: "cniVersion", Value: text(&conf.CNIVersion, "1.0.0", anyText[string])},
		{Name: "cniVersions", Value: list(&versions, "1.0.0", parseVersion)},
		{Name: "disableCheck", Value: looseBoolean(&ignored)},
		{Name: "disableGC", Value: looseBoolean(&ignored)},
		{Name: "loadOnlyInlinedPlugins", Value: looseBoolean(&conf.inlineOnly)},
		{Name: "plugins", Value: pluginList(&plugins)},
	} {
		if value, there := values[k.Name]; there {
			k.Read(&d, k.Name, value)
		}
	}
	if conf.Network == "" && !d.Flawed["name"] {
		d.failWithoutName()
	}
	return conf, plugins, d.Err()
}

// parsePlugin matches keys in any letter case, as libcni and the skeleton of plugins do.
func parsePlugin(path string, doc []byte) (plugin, error) {
	p := plugin{doc: doc, file: path}
	if err := unmarshal(doc, &p.PluginConf); err != nil {
		return p, err
	}
	var list struct{ Plugins json.RawMessage }
	switch {
	case p.Type != "":
		return p, nil
	case json.Unmarshal(doc, &list) == nil && list.Plugins != nil:
		return p, errors.New("plugins: lists are read from .conflist files alone; rename the file")
	}
	return p, errors.New(`type: is missing; write the name of a plugin, such as "bridge"`)
}

// unmarshal distinguishes text that is not JSON from JSON of the wrong type.
func unmarshal(doc []byte, to any) error {
	err := json.Unmarshal(doc, to)
	var wrong *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrong) && wrong.Field == "":
		return fmt.Errorf("is %s; write an object, in braces", policy.Printable(wrong.Value))
	case errors.As(err, &wrong):
		return fmt.Errorf("%s: is %s; write what the CNI specification has there", policy.Printable(wrong.Field), policy.Printable(wrong.Value))
	}
	return syntaxError(doc, err)
}

// looseBoolean reads a boolean of a list, which libcni also accepts as a string.
func looseBoolean(to *bool) Value {
	v := boolean(to)
	read := v.Read
	v.Read = func(d *Document, key string, value json.RawMessage) {
		if s, _ := StringValue(value); strings.EqualFold(s, "true") || strings.EqualFold(s, "false") {
			value = json.RawMessage(strings.ToLower(s))
		}
		read(d, key, value)
	}
	return v
}

func pluginList(to *[]plugin) Value {
	return Value{Kind: List, Read: func(d *Document, key string, value json.RawMessage) {
		if KindOf(value) != List {
			d.wrongKind(key, -1, value, "a list of plugin configurations")
			return
		}
		items := Elements(value)
		if len(items) == 0 {
			d.Fail(key, -1, "", "is empty; write at least one plugin configuration")
		}
		for i, item := range items {
			// libcni encodes items again before it parses them. That sorts their keys, which
			// decides between keys that differ in letter case only.
			var values map[string]any
			if json.Unmarshal(item, &values) == nil && values != nil {
				if sorted, err := json.Marshal(values); err == nil {
					item = sorted
				}
			}
			p, err := parsePlugin(d.File, item)
			if err != nil {
				d.NoteAt(0, fmt.Errorf("%s[%d]: %w", key, i, err))
			}
			*to = append(*to, p)
		}
	}}
}

func parseVersion(s string) (string, error) {
	if _, _, _, err := version.ParseVersion(s); err != nil || s == "" {
		return "", errors.New("is not a version; write one such as 1.0.0")
	}
	return s, nil
}

func readPluginFolder(dir string) ([]plugin, error) {
	names, err := filesIn(dir, ".conf")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the plugin configurations in %s: %w", policy.Printable(dir), err)
	}
	var plugins []plugin
	for _, name := range names {
		path := filepath.Join(dir, name)
		doc, err := readConfFile(path)
		if errors.Is(err, errGone) {
			continue
		}
		if err != nil {
			return nil, err
		}
		p, err := parsePlugin(path, doc)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", policy.Printable(path), err)
		}
		plugins = append(plugins, p)
	}
	return plugins, nil
}

// add adds the plugins of the list. A plugin entry is read as the runtime hands it to the
// plugin: with the name and the version of the list, and encoded again, as libcni does.
func (l *Conflist) add(plugins []plugin) {
	for i, p := range plugins {
		l.Types, l.Plugins = append(l.Types, p.Type), append(l.Plugins, p.doc)
		if p.Type != PluginType {
			continue
		}
		e := ConflistEntry{Index: i}
		var values map[string]any
		err := unmarshal(p.doc, &values)
		if err == nil {
			values["name"], values["cniVersion"] = l.Network, l.CNIVersion
			var handed []byte
			if handed, err = json.Marshal(values); err == nil {
				e.Netconf = ReadNetconf(handed)
				e.Entry, err = e.Netconf.Entry()
			}
		}
		if err != nil {
			e.Err = fmt.Errorf("%s: plugins[%d]: %w", policy.Printable(p.file), i, err)
		}
		l.Entries = append(l.Entries, e)
	}
}

// NodeDataDir returns the dataDir that the files of a node state for all networks, and the
// file or directory that states it: plugin.toml's data_dir, else the dataDir on which all
// plugin entries in the conflists agree. It is "" if no file states one or if entries
// differ. A file that cannot be loaded and an invalid entry do not count, but may state
// another one: then the result is not certain. Conflists are read only without a plugin.toml.
func NodeDataDir(guard PluginFile, read func() ConfDir) (dataDir, origin string, certain bool) {
	if guard.Present {
		return guard.DataDir, guard.Path, true
	}
	confs := read()
	certain = confs.Err() == nil
	for _, list := range confs.Conflists {
		for _, e := range list.Entries {
			switch {
			case e.Err != nil:
				certain = false
			case e.Entry.DataDir == dataDir:
			case dataDir != "":
				return "", "", false
			default:
				dataDir = e.Entry.DataDir
			}
		}
	}
	return dataDir, confs.Dir, certain
}
