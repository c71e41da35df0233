// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ConfDir is what the configuration directory of the runtimes holds.
type ConfDir struct {
	Dir       string
	Conflists []Conflist // by the file's name, which is how runtimes choose
	// Changed is when a file was last added, removed or written.
	Changed time.Time

	naming map[string]*Conflist // by network, the first with an entry of ours
	err    error                // of all that are broken
}

// Conflist is one file of the directory. A file that runtimes cannot load has an
// Err, and is otherwise empty but for its File and perhaps its Network.
type Conflist struct {
	File       string // the path
	Doc        []byte // the text
	Network    string // "" for a single plugin's configuration without a name
	CNIVersion string
	Types      []string        // of all plugins, in their order
	Entries    []ConflistEntry // ours alone
	Err        error
}

// ConflistEntry is one of our entries. An Err is about it alone: runtimes load
// the list, and the plugin refuses the entry.
type ConflistEntry struct {
	Index   int // among the plugins of the list
	Netconf Netconf
	Entry   Entry
	Err     error
}

// IsMultus reports whether a type of plugins is Multus, thin or thick, which
// delegates to another network.
func IsMultus(plugin string) bool { return plugin == "multus" || plugin == "multus-shim" }

// IsMultus reports whether the network's main plugin is Multus.
func (l Conflist) IsMultus() bool { return len(l.Types) > 0 && IsMultus(l.Types[0]) }

// ErrPosition says that no plugin stands before the plugin entry of a conflist: every
// ADD fails, as nothing has made an interface.
var ErrPosition = errors.New("stands where every ADD fails")

// PositionErr returns an ErrPosition, or nil where the plugin entry stands behind
// another plugin or is missing.
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

// DataDirErr returns why ADDs fail, or nil: a plugin entry of the list has another
// dataDir than the reconciler, and no plugin.toml states one for all.
func (l Conflist) DataDirErr(guard PluginFile, reconcilers string) error {
	for _, e := range l.Entries {
		if e.Err == nil && !guard.Present && e.Entry.DataDir != reconcilers {
			return fmt.Errorf("%s: plugins[%d]: dataDir: %s is not the reconciler's data_dir, %s; a node has one dataDir: state the same in both",
				policy.Printable(l.File), e.Index, policy.Quote(e.Entry.DataDir), policy.Quote(reconcilers))
		}
	}
	return nil
}

// CheckPlugin returns why runtimes cannot run the plugin from a directory, or nil.
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

// ReadConfDir reads the files of a directory that runtimes take for
// configurations (.conf, .conflist, .json) as libcni reads them. A file that is
// broken has an error of its own. The error is about the directory itself, and
// is an fs.ErrNotExist where there is none.
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
		if err != nil {
			list.Err = err
		}
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

// lastChange returns the latest mtime of the directory and its files; of what
// went away meanwhile the directory tells.
func lastChange(dir string, names []string) time.Time {
	var last time.Time
	for _, path := range append([]string{dir}, names...) {
		if path != dir {
			path = filepath.Join(dir, path)
		}
		if info, err := os.Stat(path); err == nil && info.ModTime().After(last) {
			last = info.ModTime()
		}
	}
	return last
}

// Names reports whether a conflist that can be read names the network and has an
// entry of ours, sound or not.
func (c ConfDir) HasEntry(network string) bool { return c.first(network) != nil }

// SourcePolicy returns what the first conflist by name that has an entry of ours
// for the network states in the first one it has. It is false where there is
// none, and where that entry is refused.
func (c ConfDir) Policy(network string) (policy.SourcePolicy, bool) {
	e := c.first(network)
	if e == nil || e.Err != nil {
		return policy.SourcePolicy{}, false
	}
	return e.Entry.Policy, true
}

// Lacks reports whether no conflist has an entry of ours for the network, which
// nobody knows while a file cannot be read.
func (c ConfDir) LacksEntry(network string) bool { return c.Err() == nil && !c.HasEntry(network) }

// Has reports whether Statement returns this one.
func (c ConfDir) HasEntryWith(network string, s policy.SourcePolicy) bool {
	onDisk, found := c.Policy(network)
	return found && onDisk.Equal(s)
}

// Err tells of the files that runtimes cannot load: while there are any, nobody
// knows all the networks. Nil says that the directory parses whole.
func (c ConfDir) Err() error { return c.err }

func (c ConfDir) first(network string) *ConflistEntry {
	if list := c.naming[network]; list != nil {
		return &list.Entries[0]
	}
	return nil
}

// filesIn returns the names, sorted, of what is no directory and ends in one of
// the extensions.
func filesIn(dir string, extensions ...string) ([]string, error) {
	f, err := OpenFile(dir, syscall.O_DIRECTORY)
	if err != nil {
		return nil, Bare(err)
	}
	defer closed(f)
	entries, err := f.ReadDir(-1)
	if err != nil {
		return nil, Bare(err)
	}
	var names []string
	for _, e := range entries {
		if !e.IsDir() && slices.Contains(extensions, filepath.Ext(e.Name())) {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

// errGone is that of a file which was removed since its directory was read.
var errGone = errors.New("is gone")

func readConfFile(path string) ([]byte, error) {
	f, err := OpenFile(path, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			return nil, errGone
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", policy.Printable(path), Bare(err))
	}
	defer closed(f)
	const mostKiB = 1024
	return ReadRegular(f, mostKiB, nil)
}

func readConflist(path string) (Conflist, error) {
	doc, err := readConfFile(path)
	if err != nil {
		return Conflist{File: path}, err
	}
	conf, err := parseConflist(path, doc)
	if err == nil && conf.loadsFolder {
		// libcni adds what a folder of the network's name holds.
		var more []plugin
		if more, err = readPluginFolder(filepath.Join(filepath.Dir(path), conf.network)); err != nil {
			err = fmt.Errorf("%s: %w", policy.Printable(path), err)
		}
		conf.plugins = append(conf.plugins, more...)
	}
	if err == nil && len(conf.plugins) == 0 {
		err = fmt.Errorf("%s: plugins: is missing; write a list of plugin configurations", policy.Printable(path))
	}
	return conf.exported(path, doc, err), err
}

// ParseConflist parses the text of a file as ReadConfDir does, but without the folder of the
// network's name: a list may have no plugins of its own.
func ParseConflist(path string, doc []byte) (Conflist, error) {
	conf, err := parseConflist(path, doc)
	return conf.exported(path, doc, err), err
}

func (c conflist) exported(path string, doc []byte, err error) Conflist {
	list := Conflist{File: path, Doc: doc, Network: c.network, CNIVersion: c.cniVersion}
	if err != nil {
		return list
	}
	for _, p := range c.plugins {
		list.Types = append(list.Types, p.conf.Type)
	}
	list.Entries = c.entries()
	return list
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
		p, err := parsePlugin(doc)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", policy.Printable(path), err)
		}
		p.file = path
		plugins = append(plugins, p)
	}
	return plugins, nil
}

// isListFile tells by a file's name, as runtimes do, that it has to hold a list
// and not a single plugin's configuration.
func isListFile(path string) bool { return filepath.Ext(path) == ".conflist" }

// NodeDataDir returns the dataDir that the files of a node state for every network,
// and which file or directory that is: plugin.toml's data_dir, else the dataDir of
// all plugin entries in the conflists. It is "" where no file states one or where
// entries differ. A file that cannot be read and an entry that the plugin refuses do
// not count, but may mean another one: then the answer is not certain. The conflists
// are read only where there is no plugin.toml.
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
