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

// DefaultPluginFile is where the plugin looks for its administrators' word.
const DefaultPluginFile = "/etc/ip-masq/plugin.toml"

// PluginFile is what a node's administrators tell the plugin. Entries can come
// from people who are not administrators: where there is such a file, only the
// networks that it lists may contribute, their policy is that of their conflists,
// and its data_dir holds whatever an entry says.
type PluginFile struct {
	Path    string
	Present bool

	// AllowNetworks is who may contribute. Nobody may where the file is
	// Present and does not have the key, for which this is nil.
	AllowNetworks []string
	// AllowUnlisted is whose entries are taken as the runtime hands them over if
	// no conflist in CNIConfDir has one. They have to be in AllowNetworks too.
	AllowUnlisted []string
	DataDir       string // absolute and clean; of no meaning unless Present
	CNIConfDir    string // absolute and clean; where the conflists of the node are
}

// ReadPluginFile reads the file. One that does not exist is no error: the
// result is not Present and has the defaults. (A link to a file that does not
// exist is one, since somebody meant there to be a guard.)
//
// A file that guards must not be the work of those it guards against: it is
// refused unless it belongs to root or to us and nobody else may write it. After
// an error the result is Present, allows no network, and has the directories
// that could be read or else the defaults.
func ReadPluginFile(path string) (PluginFile, error) {
	absent := PluginFile{Path: path, DataDir: DefaultDataDir, CNIConfDir: DefaultCNIConfDir}
	refused := absent
	refused.Present = true
	f, err := OpenFile(path, syscall.O_NOFOLLOW)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return absent, nil
	case errors.Is(err, syscall.ELOOP): // the answer to O_NOFOLLOW
		f, err = OpenFile(path, 0)
	}
	if err != nil {
		return refused, fmt.Errorf("open %s: %w; repair it, or remove it to let every network contribute", policy.Printable(path), Bare(err))
	}
	defer closed(f)
	// The TOML decoder's time can grow with the square of the size.
	const mostKiB = 64
	doc, err := ReadRegular(f, mostKiB, isOurs(path))
	if err != nil {
		return refused, err
	}
	return parsePluginFile(path, doc)
}

// isOurs refuses a file that others than root and ourselves may have written.
func isOurs(path string) func(fs.FileInfo) error {
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
	f := Document{File: path}
	f.Read(members, []Key{
		{"allow_networks", list(&p.AllowNetworks, "podnet", parseNetworkName)},
		{"allow_unlisted_networks", list(&p.AllowUnlisted, "podnet", parseNetworkName)},
		{"data_dir", text(DefaultDataDir, pathLike(DefaultDataDir), func(s string) { p.DataDir = s })},
		{"cni_conf_dir", text(DefaultCNIConfDir, pathLike(DefaultCNIConfDir), func(s string) { p.CNIConfDir = s })},
	})
	if err := f.Err(); err != nil {
		p.AllowNetworks, p.AllowUnlisted = nil, nil
		return p, err
	}
	return p, nil
}

// Admits tells why a network may not contribute, and what to write so that it
// may.
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

// ErrConflistUnknown says that nobody knows what the conflist of a network says:
// the directory or a file of it cannot be read.
var ErrConflistUnknown = errors.New("its conflist cannot be read")

// Netconf returns the plugin entry of the network's conflist, and the file that
// it is in. Where no conflist has one, it returns what the runtime handed over if
// that is allowed, and otherwise an error that says what to write. Conflists is
// what ReadConfDir returned.
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
