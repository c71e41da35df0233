// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"syscall"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// DefaultPluginFile is the path of plugin.toml.
const DefaultPluginFile = "/etc/ip-masq/plugin.toml"

// PluginFile is plugin.toml, in which the node's administrators restrict plugin entries, as
// others may write those. If it exists, only the networks that it lists may contribute, their
// policy is that of their conflists, and its data_dir applies to every entry.
type PluginFile struct {
	Path    string
	Present bool

	// AllowNetworks are the networks that may contribute. It is nil if a file that is
	// Present lacks the key, which allows none.
	AllowNetworks []string
	// AllowUnlisted are the networks whose entries are taken from the runtime if no conflist
	// in CNIConfDir has one. They must be in AllowNetworks too.
	AllowUnlisted []string
	DataDir       string // absolute and clean; meaningless unless Present
	CNIConfDir    string // absolute and clean; the directory of the conflists
}

// ReadPluginFile reads the file. Without one the result is not Present and has the defaults.
// (A symlink to a missing file is an error, as an administrator meant to have one.)
//
// It is an error if users other than root and this process's may write the file. After an
// error the result is Present, allows no network, and has the directories that could be read
// or else the defaults.
func ReadPluginFile(path string) (PluginFile, error) {
	absent := PluginFile{Path: path, DataDir: DefaultDataDir, CNIConfDir: DefaultCNIConfDir}
	refused := absent
	refused.Present = true
	f, err := OpenFile(path, 0)
	switch {
	case missing(path, err):
		return absent, nil
	case err != nil:
		return refused, fmt.Errorf("open %s: %w; repair it, or remove it to let every network contribute", policy.Printable(path), Bare(err))
	}
	defer closed(f)
	doc, err := ReadRegular(f, mostTOML, checkOwner(path))
	if err != nil {
		return refused, err
	}
	return parsePluginFile(path, doc)
}

// checkOwner refuses a file that users other than root and this process's may write.
func checkOwner(path string) func(fs.FileInfo) error {
	return func(info fs.FileInfo) error {
		if stat, ok := info.Sys().(*syscall.Stat_t); ok && stat.Uid != 0 && int(stat.Uid) != os.Geteuid() {
			return fmt.Errorf("%s belongs to user %d, who could lift what it forbids; chown it to root", policy.Printable(path), stat.Uid)
		}
		if mode := info.Mode().Perm(); mode&0o022 != 0 {
			return fmt.Errorf("%s can be written by others than its owner (mode %04o), who could lift what it forbids; chmod it to 0644",
				policy.Printable(path), mode)
		}
		return nil
	}
}

func parsePluginFile(path string, doc []byte) (PluginFile, error) {
	p := PluginFile{Path: path, Present: true, DataDir: DefaultDataDir, CNIConfDir: DefaultCNIConfDir}
	members, err := tomlMembers(path, doc)
	if err != nil {
		return p, err
	}
	d := Document{File: path}
	d.Read(members, []Key{
		{Name: "allow_networks", Value: list(&p.AllowNetworks, "podnet", parseNetworkName)},
		{Name: "allow_unlisted_networks", Value: list(&p.AllowUnlisted, "podnet", parseNetworkName)},
		{Name: "data_dir", Value: directory(&p.DataDir, DefaultDataDir)},
		{Name: "cni_conf_dir", Value: directory(&p.CNIConfDir, DefaultCNIConfDir)},
	})
	if err := d.Err(); err != nil {
		p.AllowNetworks, p.AllowUnlisted = nil, nil
		return p, err
	}
	return p, nil
}

// Admits returns an error with a remedy if the network may not contribute.
func (p PluginFile) Admits(network string) error {
	name := policy.Quote(network)
	switch {
	case !p.Present || slices.Contains(p.AllowNetworks, network):
		return nil
	case p.AllowNetworks == nil:
		return fmt.Errorf("network %s may not contribute: %s has no allow_networks, which allows no network; write allow_networks = [%s] there",
			name, policy.Printable(p.Path), name)
	case slices.Contains(p.AllowUnlisted, network):
		return fmt.Errorf("network %s may not contribute: it is in allow_unlisted_networks of %s and not in allow_networks; add it there too", name, policy.Printable(p.Path))
	default:
		return fmt.Errorf("network %s may not contribute: it is not in allow_networks of %s; add it there", name, policy.Printable(p.Path))
	}
}

// ErrConflistUnknown reports that the conflist of a network is unknown, because the directory
// or one of its files cannot be read.
var ErrConflistUnknown = errors.New("its conflist cannot be read")

// Netconf returns the plugin entry in the network's conflist, and the file that it is in.
// Without one it returns the entry that the runtime handed over if that is allowed, and
// otherwise an error with a remedy. The last two arguments are the results of ReadConfDir.
func (p PluginFile) Netconf(network string, handed Netconf, conflists ConfDir, err error) (Netconf, string, error) {
	if list := conflists.naming[network]; list != nil {
		return list.Entries[0].Netconf, list.File, list.Entries[0].Err
	}
	if slices.Contains(p.AllowUnlisted, network) {
		return handed, "", nil
	}
	name, dir := policy.Quote(network), policy.Printable(p.CNIConfDir)
	if err != nil {
		return Netconf{}, "", fmt.Errorf("network %s: %w: %w; write the runtime's directory as cni_conf_dir into %s",
			name, ErrConflistUnknown, err, policy.Printable(p.Path))
	}
	for _, list := range conflists.Conflists {
		if list.Network == network && list.Err == nil {
			return Netconf{}, "", fmt.Errorf("network %s may not contribute: its conflist %s has no plugin entry, and %s takes its policy from there; "+
				"add the entry, or the network to allow_unlisted_networks", name, policy.Printable(list.File), policy.Printable(p.Path))
		}
	}
	if err := conflists.Err(); err != nil {
		return Netconf{}, "", fmt.Errorf("network %s: %w: %w; repair it", name, ErrConflistUnknown, err)
	}
	return Netconf{}, "", fmt.Errorf("network %s may not contribute: no conflist in %s has its plugin entry, and %s takes its policy from there; "+
		"write one, correct cni_conf_dir, or add the network to allow_unlisted_networks", name, dir, policy.Printable(p.Path))
}
