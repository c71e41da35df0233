// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
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
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// DefaultCNIConfDir is the configuration directory of most runtimes.
const DefaultCNIConfDir = "/etc/cni/net.d"

const (
	listExtension = ".conflist"
	maxConfSize   = 1 << 20 // bytes
)

// ConfDir is the content of the CNI configuration directory.
type ConfDir struct {
	Dir       string
	Conflists []Conflist // sorted by file name: runtimes use the first
	// Changed is when a file was last added, removed or written.
	Changed time.Time
}

// Conflist is one file of the directory. With an Err, Types, Plugins and Entries are empty.
type Conflist struct {
	File       string            // the path
	Doc        []byte            // the text
	Network    string            // "" for the configuration of a single plugin without a name
	CNIVersion string            // as stated; a list with cniVersions may get another one
	Types      []string          // of all plugins, in order
	Plugins    []json.RawMessage // parts of Doc
	Entries    []ConflistEntry   // the plugin entries
	Err        error
}

// ConflistEntry is a plugin entry. If Err is set, runtimes load the list and the plugin refuses the entry.
type ConflistEntry struct {
	Index   int // among the plugins of the list
	Netconf Netconf
	Entry   Entry
	Err     error
}

// IsMultus reports whether the network's main plugin is Multus, thin or thick, which delegates to another
// network.
func (l Conflist) IsMultus() bool {
	return len(l.Types) > 0 && (l.Types[0] == "multus" || l.Types[0] == "multus-shim")
}

// ErrPosition reports a plugin entry without a plugin before it that creates an interface.
var ErrPosition = errors.New("stands where every ADD fails")

// PositionErr returns an ErrPosition if the plugin entry is the first plugin.
func (l Conflist) PositionErr() error {
	if len(l.Entries) == 0 || l.Entries[0].Index > 0 {
		return nil
	}
	return fmt.Errorf("%s: plugins[0]: the plugin entry of network %s %w, first: "+
		"move it behind the plugin that makes the interface; if there is none, remove the file",
		policy.Printable(l.File), policy.Quote(l.Network), ErrPosition)
}

// VersionErr returns why every ADD fails if a file with the plugin entry states a version of the CNI
// specification that the plugin does not know. Of a list with cniVersions the runtime chooses the version.
func (l Conflist) VersionErr() error {
	if len(l.Entries) == 0 || l.CNIVersion == "" {
		return nil
	}
	known := version.All.SupportedVersions()
	if slices.Contains(known, l.CNIVersion) {
		return nil
	}
	var list struct {
		Versions json.RawMessage `json:"cniVersions"`
	}
	if json.Unmarshal(l.Doc, &list) == nil && list.Versions != nil {
		return nil
	}
	return fmt.Errorf("%s: cniVersion: %s is none that the plugin knows, so every ADD of network %s fails; "+
		"write one of %s", policy.Printable(l.File), policy.Quote(l.CNIVersion),
		policy.Quote(l.Network), strings.Join(known, ", "))
}

// Masquerading returns the indices of the plugins that masquerade, or that delegate to one that does: those
// with "ipMasq": true.
func (l Conflist) Masquerading() []int {
	var found []int
	for i, text := range l.Plugins {
		var plugin any
		if json.Unmarshal(text, &plugin) == nil && l.Types[i] != PluginType && masquerades(plugin) {
			found = append(found, i)
		}
	}
	return found
}

func masquerades(plugin any) bool {
	switch p := plugin.(type) {
	case map[string]any:
		return p["ipMasq"] == true || masquerades(p["delegate"]) || masquerades(p["delegates"])
	case []any:
		return slices.ContainsFunc(p, masquerades)
	}
	return false
}

// DataDirErr returns why ADDs fail if an entry's dataDir is not plugin.toml's or, without it, the
// reconciler's.
func (l Conflist) DataDirErr(file PluginFile, reconcilerDir string) error {
	for _, e := range l.Entries {
		if e.Err != nil { // which is reported in its place
			continue
		}
		err := file.DataDirErr(e.Netconf)
		if !file.Present && e.Entry.DataDir != reconcilerDir {
			err = fmt.Errorf("dataDir: %s is not the reconciler's data_dir, %s; "+
				"a node has one dataDir: state the same in both",
				policy.Quote(e.Entry.DataDir), policy.Quote(reconcilerDir))
		}
		if err != nil {
			return fmt.Errorf("%s: plugins[%d]: %w", policy.Printable(l.File), e.Index, err)
		}
	}
	return nil
}

// CheckPlugin returns an error if runtimes cannot run the plugin from the directory.
func CheckPlugin(dir string) error {
	path := filepath.Join(dir, PluginType)
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s is missing", policy.Printable(path))
	case err != nil:
		return safefile.Error("stat", path, err)
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is not a regular file", policy.Printable(path))
	case info.Mode().Perm()&0o111 == 0:
		return fmt.Errorf("%s is not executable (mode %04o)", policy.Printable(path), info.Mode().Perm())
	}
	return nil
}

// ReadConfDir reads the files that runtimes take for configurations. A missing directory is an
// fs.ErrNotExist.
func ReadConfDir(dir string) (ConfDir, error) {
	c := ConfDir{Dir: dir}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return c, safefile.Error("read the CNI configuration directory", dir, err)
	}
	if info, err := os.Stat(dir); err == nil {
		c.Changed = info.ModTime() // changes when a file is removed
	}
	for _, e := range entries {
		if e.IsDir() || !slices.Contains([]string{".conf", listExtension, ".json"}, filepath.Ext(e.Name())) {
			continue
		}
		path := filepath.Join(dir, e.Name())
		doc, info, err := safefile.ReadFile(path, maxConfSize)
		if errors.Is(err, fs.ErrNotExist) { // since the directory was read
			continue
		}
		list := Conflist{File: path, Doc: doc, Err: err}
		if err == nil {
			list = ParseConflist(path, doc)
		}
		if info != nil && info.ModTime().After(c.Changed) {
			c.Changed = info.ModTime()
		}
		c.Conflists = append(c.Conflists, list)
	}
	return c, nil
}

// WithEntry returns the first conflist of the network that has a plugin entry, or nil: the one that counts
// without a plugin.toml.
func (c ConfDir) WithEntry(network string) *Conflist { return PluginFile{}.Conflist(c, network) }

// With returns the directory with one file replaced or added.
func (c ConfDir) With(list Conflist) ConfDir {
	all := []Conflist{list}
	for _, l := range c.Conflists {
		if l.File != list.File {
			all = append(all, l)
		}
	}
	slices.SortFunc(all, func(a, b Conflist) int { return cmp.Compare(a.File, b.File) })
	c.Conflists = all
	return c
}

// HasEntry reports whether a conflist has a plugin entry for the network, valid or not.
func (c ConfDir) HasEntry(network string) bool { return c.WithEntry(network) != nil }

// LacksEntry reports whether all conflists could be read and none has a plugin entry for the network.
func (c ConfDir) LacksEntry(network string) bool { return c.Err() == nil && !c.HasEntry(network) }

// HasEntryWith reports whether the network's first plugin entry is valid and has this policy.
func (c ConfDir) HasEntryWith(network string, s policy.SourcePolicy) bool {
	list := c.WithEntry(network)
	return list != nil && list.Entries[0].Err == nil && list.Entries[0].Entry.Policy.Equal(s)
}

// Err returns the errors of the files that runtimes cannot load, as one DocumentError, or nil.
func (c ConfDir) Err() error {
	var mistakes []error
	for _, l := range c.Conflists {
		if l.Err != nil {
			mistakes = append(mistakes, l.Err)
		}
	}
	if len(mistakes) == 0 {
		return nil
	}
	return &DocumentError{mistakes}
}

// IsList reports whether runtimes expect a list in the file, not the configuration of a single plugin.
func (l Conflist) IsList() bool { return filepath.Ext(l.File) == listExtension }

// ParseConflist parses the text of a file as libcni does. In a list the last of two equal keys counts, and
// unknown keys are ignored.
//
// libcni itself returns an error for a whole directory if one file in it is broken (LoadNetworkConf), and its
// imports make the plugin 1.4 MB larger (OpenTelemetry).
func ParseConflist(path string, doc []byte) Conflist {
	l := Conflist{File: path, Doc: doc}
	d := Document{File: path}
	var err error
	if l.IsList() {
		err = l.parseList(&d)
	} else {
		err = l.add(doc)
	}
	if err != nil {
		d.NoteAt(0, err)
	}
	if d.Err() != nil {
		return Conflist{File: path, Doc: doc, Network: l.Network, CNIVersion: l.CNIVersion, Err: d.Err()}
	}
	return l
}

func (l *Conflist) parseList(d *Document) error {
	if err := unmarshal(l.Doc, &map[string]json.RawMessage{}); err != nil {
		return err
	}
	values := map[string]json.RawMessage{}
	for _, m := range membersOf(bytes.TrimSpace(l.Doc)) {
		values[m.Key] = m.Value
	}
	for _, k := range []Key{
		{Name: "name", Value: networkName(&l.Network)},
		{Name: "cniVersion", Value: text(&l.CNIVersion, "1.0.0", anyText[string])},
		{Name: "plugins", Value: Value{List, pluginsField{l}}},
	} {
		if value, there := values[k.Name]; there {
			k.Read(d, k.Name, value)
		}
	}
	d.requireName(l.Network)
	if len(d.Mistakes) == 0 && len(l.Types) == 0 {
		return errors.New("plugins: is missing; write a list of plugin configurations")
	}
	return nil
}

// pluginsField adds the plugins of a list.
type pluginsField struct{ list *Conflist }

func (pluginsField) want() string { return "a list of plugin configurations" }

func (pluginsField) text() string { return "" }

func (f pluginsField) read(d *Document, key string, value json.RawMessage) {
	items := elements(value)
	if len(items) == 0 {
		d.Fail(key, -1, "", "is empty; write at least one plugin configuration")
	}
	for i, item := range items {
		if err := f.list.add(item); err != nil {
			d.NoteAt(0, fmt.Errorf("%s[%d]: %w", key, i, err))
		}
	}
}

// NetconfInList returns a plugin entry as runtimes hand it to the plugin: with the name and the
// version of its list, and encoded again, as libcni does.
func NetconfInList(entry []byte, network, cniVersion string) (Netconf, error) {
	values := map[string]any{}
	if err := unmarshal(entry, &values); err != nil {
		return Netconf{}, err
	}
	values["name"], values["cniVersion"] = network, cniVersion
	handed, err := json.Marshal(values)
	return ReadNetconf(handed), err
}

// add adds a plugin. Its keys match in any letter case, as in libcni.
func (l *Conflist) add(doc []byte) error {
	var p types.PluginConf
	if err := unmarshal(doc, &p); err != nil {
		return err
	}
	if p.Type == "" {
		return errors.New(`type: is missing; write the name of a plugin, such as "bridge", ` +
			`or rename a list to .conflist`)
	}
	if !l.IsList() {
		l.Network, l.CNIVersion = p.Name, p.CNIVersion
	}
	l.Types, l.Plugins = append(l.Types, p.Type), append(l.Plugins, doc)
	if p.Type != PluginType {
		return nil
	}
	e := ConflistEntry{Index: len(l.Types) - 1}
	var err error
	e.Netconf, err = NetconfInList(doc, l.Network, l.CNIVersion)
	if err == nil {
		e.Entry, err = e.Netconf.Entry()
	}
	if err != nil {
		e.Err = fmt.Errorf("%s: plugins[%d]: %w", policy.Printable(l.File), e.Index, err)
	}
	l.Entries = append(l.Entries, e)
	return nil
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
		return fmt.Errorf("%s: is %s; write what the CNI specification has there",
			policy.Printable(wrong.Field), policy.Printable(wrong.Value))
	}
	return syntaxError(doc, err)
}

// DigestOf returns the digest of a text, such as a conflist.
func DigestOf(doc []byte) string {
	sum := sha256.Sum256(doc)
	return hex.EncodeToString(sum[:])
}
