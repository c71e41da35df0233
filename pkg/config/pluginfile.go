// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// DefaultPluginFile is the path of plugin.toml.
const DefaultPluginFile = "/etc/ip-masq/plugin.toml"

// PluginFile is plugin.toml. If it exists, the policy of a network is the plugin entry in its conflist in the
// directory that the file names, not the entry that the runtime hands over. Its data_dir is the dataDir of
// the node.
type PluginFile struct {
	Path    string
	Present bool
	Invalid bool // it cannot be read, or has mistakes

	DataDir    string // absolute and clean; meaningless unless Present
	CNIConfDir string // absolute and clean; the directory of the conflists
}

// ReadPluginFile reads the file. Without it the result has the defaults and is not Present. If the file is a
// symlink to a missing one, or other users can write it, the result is Present and Invalid, with an error.
func ReadPluginFile(path string) (PluginFile, error) {
	p := PluginFile{Path: path, DataDir: DefaultDataDir, CNIConfDir: DefaultCNIConfDir}
	if safefile.IsMissing(path) {
		return p, nil
	}
	doc, info, err := safefile.ReadFile(path, maxTOMLSize)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	p.Present = true
	if err != nil {
		err = fmt.Errorf("%w; repair it, or remove it to take policies from what the runtime hands over", err)
	} else {
		err = p.parseIfTrusted(doc, info)
	}
	p.Invalid = err != nil
	return p, err
}

func checkOwner(path string, info fs.FileInfo) error {
	uid, _ := safefile.Owner(info)
	if uid != 0 && uid != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d, who could lift what it forbids; chown it to root",
			policy.Printable(path), uid)
	}
	mode := info.Mode().Perm()
	if mode&0o022 != 0 {
		return fmt.Errorf("%s can be written by others than its owner (mode %04o), "+
			"who could lift what it forbids; chmod it to 0644", policy.Printable(path), mode)
	}
	return nil
}

// parseIfTrusted parses the file. What others could write is not even read.
func (p *PluginFile) parseIfTrusted(doc []byte, info fs.FileInfo) error {
	if err := checkOwner(p.Path, info); err != nil {
		return err
	}
	return p.parse(doc)
}

func (p *PluginFile) parse(doc []byte) error {
	members, err := tomlMembers(p.Path, doc)
	if err != nil {
		return err
	}
	d := Document{File: p.Path}
	d.Read(members, []Key{
		{Name: "data_dir", Value: dataDirectory(&p.DataDir)},
		{Name: "cni_conf_dir", Value: directory(&p.CNIConfDir, DefaultCNIConfDir)},
	})
	return d.Err()
}

// DataDirErr returns an error if the file is valid and an entry states another dataDir.
func (p PluginFile) DataDirErr(entry Netconf) error {
	isStated := entry.Value("dataDir") != nil
	if !p.Present || p.Invalid || !isStated {
		return nil
	}
	dataDir := entry.Identity().DataDir
	if dataDir == p.DataDir {
		return nil
	}
	return fmt.Errorf("dataDir: %s is not the data_dir of %s, %s, which is that of the node; remove the key",
		policy.Quote(dataDir), policy.Printable(p.Path), policy.Quote(p.DataDir))
}

// Conflist returns the conflist that states the policy of a network, or nil: the first one with a plugin
// entry or, if plugin.toml exists, the first one, if it has a plugin entry. Files that cannot be loaded do
// not count.
func (p PluginFile) Conflist(dir ConfDir, network string) *Conflist {
	if network == "" {
		return nil
	}
	for i, l := range dir.Conflists {
		if l.Network != network || l.Err != nil {
			continue
		}
		if len(l.Entries) > 0 {
			return &dir.Conflists[i]
		}
		if p.Present {
			return nil
		}
	}
	return nil
}

// PolicyDir returns the directory of the conflists that state policies because of plugin.toml, "" without
// that.
func (p PluginFile) PolicyDir() string {
	if !p.Present {
		return ""
	}
	return p.CNIConfDir
}

// ErrConflistUnknown reports that the directory or a file that may be a network's conflist cannot be read.
var ErrConflistUnknown = errors.New("its conflist cannot be read")

// Netconf returns the plugin entry in the network's conflist, and the file that it is in. Without one it
// returns an error with a remedy. The last two arguments are the results of ReadConfDir.
func (p PluginFile) Netconf(network string, conflists ConfDir, err error) (Netconf, string, error) {
	if list := p.Conflist(conflists, network); list != nil {
		entry := list.Entries[0]
		return entry.Netconf, list.File, cmp.Or(entry.Err, list.DataDirErr(p, p.DataDir))
	}
	return Netconf{}, "", fmt.Errorf("network %s%w", policy.Quote(network), p.noNetconf(network, conflists, err))
}

// noNetconf returns why a network has no policy. It continues the sentence that names the network.
func (p PluginFile) noNetconf(network string, conflists ConfDir, err error) error {
	file := policy.Printable(p.Path)
	if err != nil {
		return fmt.Errorf(": %w: %w; write the runtime's directory as cni_conf_dir into %s",
			ErrConflistUnknown, err, file)
	}
	for _, list := range conflists.Conflists {
		if list.Network == network && list.Err == nil {
			return fmt.Errorf(" has no policy: its conflist %s has no plugin entry, and %s takes it from there; "+
				"add the entry", policy.Printable(list.File), file)
		}
	}
	if err := conflists.Err(); err != nil {
		return fmt.Errorf(": %w: %w; repair it", ErrConflistUnknown, err)
	}
	return fmt.Errorf(" has no policy: no conflist in %s has its plugin entry, and %s takes it from there; "+
		"write one, or correct cni_conf_dir", policy.Printable(p.CNIConfDir), file)
}
