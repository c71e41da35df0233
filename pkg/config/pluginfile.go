// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// DefaultPluginFile is the path of plugin.toml.
const DefaultPluginFile = "/etc/ip-masq/plugin.toml"

// PluginFile is plugin.toml, in which administrators restrict plugin entries. If it exists, only
// the networks that it lists may contribute, their policy is that of their conflists, and its
// data_dir applies to every entry.
type PluginFile struct {
	Path    string
	Present bool
	Invalid bool // it cannot be read, or has mistakes, so that the networks that it admits are not known

	// AllowNetworks are the networks that may contribute; nil if the file lacks the key.
	AllowNetworks []string
	// AllowUnlisted are those that may contribute without an entry in a conflist.
	AllowUnlisted []string
	DataDir       string // absolute and clean; meaningless unless Present
	CNIConfDir    string // absolute and clean; the directory of the conflists
}

// ReadPluginFile reads the file. Without one the result is not Present and has the defaults. A
// symlink to a missing file is an error, and so is a file that users other than root and this
// process's may write: then the result is Present and allows no network.
func ReadPluginFile(path string) (PluginFile, error) {
	p := PluginFile{Path: path, DataDir: DefaultDataDir, CNIConfDir: DefaultCNIConfDir}
	doc, info, err := safefile.ReadFile(path, maxTOMLSize)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	p.Present = true
	if err != nil {
		p.Invalid = true
		return p, fmt.Errorf("%w; repair it, or remove it to let every network contribute", err)
	}
	if err = checkOwner(path, info); err == nil {
		err = p.parse(doc)
	}
	p.Invalid = err != nil
	return p, err
}

// checkOwner refuses a file that users other than root and this process's may write.
func checkOwner(path string, info fs.FileInfo) error {
	if uid, _ := safefile.Owner(info); uid != 0 && uid != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d, who could lift what it forbids; chown it to root", policy.Printable(path), uid)
	}
	if mode := info.Mode().Perm(); mode&0o022 != 0 {
		return fmt.Errorf("%s can be written by others than its owner (mode %04o), who could lift what it forbids; chmod it to 0644",
			policy.Printable(path), mode)
	}
	return nil
}

func (p *PluginFile) parse(doc []byte) error {
	members, err := tomlMembers(p.Path, doc)
	if err != nil {
		return err
	}
	d := Document{File: p.Path}
	d.Read(members, []Key{
		{Name: "allow_networks", Value: list(&p.AllowNetworks, "podnet", parseNetworkName)},
		{Name: "allow_unlisted_networks", Value: list(&p.AllowUnlisted, "podnet", parseNetworkName)},
		{Name: "data_dir", Value: dataDirectory(&p.DataDir)},
		{Name: "cni_conf_dir", Value: directory(&p.CNIConfDir, DefaultCNIConfDir)},
	})
	if len(d.Mistakes) > 0 {
		p.AllowNetworks, p.AllowUnlisted = nil, nil
	}
	return d.Err()
}

// Admits returns an error with a remedy if the network may not contribute.
func (p PluginFile) Admits(network string) error {
	var problem string
	file := policy.Printable(p.Path)
	switch {
	case !p.Present || slices.Contains(p.AllowNetworks, network):
		return nil
	case p.AllowNetworks == nil:
		problem = fmt.Sprintf("%s has no allow_networks, which allows no network; write allow_networks = [%s] there", file, policy.Quote(network))
	case slices.Contains(p.AllowUnlisted, network):
		problem = fmt.Sprintf("it is in allow_unlisted_networks of %s and not in allow_networks; add it there too", file)
	default:
		problem = fmt.Sprintf("it is not in allow_networks of %s; add it there", file)
	}
	return fmt.Errorf("network %s may not contribute: %s", policy.Quote(network), problem)
}

// InForce returns the stored sources that may be in force, and those of networks that the file does not admit. An
// invalid file excludes none: a mistake in it changes no rules. Anybody may choose the addresses in a prevResult, so
// with the file no source has subnets that ADDs found.
func (p PluginFile) InForce(stored []policy.Source) (inForce, excluded []policy.Source) {
	if !p.Present {
		return stored, nil
	}
	for _, s := range stored {
		s.PodSubnets = nil
		if s.ID.Kind == policy.Network && !p.Invalid && p.Admits(s.ID.Name) != nil {
			excluded = append(excluded, s)
		} else {
			inForce = append(inForce, s)
		}
	}
	return inForce, excluded
}

// ExcludesDocument reports whether a file in the dataDir is the document of a network that the file does not admit,
// also if the document cannot be read.
func (p PluginFile) ExcludesDocument(file string, documentPath func(policy.SourceID) string) bool {
	admitted := func(network string) bool {
		return documentPath(policy.SourceID{Kind: policy.Network, Name: network}) == file
	}
	return p.Present && !p.Invalid && file != documentPath(policy.SourceID{Kind: policy.AgentFiles}) &&
		!slices.ContainsFunc(p.AllowNetworks, admitted)
}

// ErrConflistUnknown reports that the conflist of a network is unknown, because the directory
// or one of its files cannot be read.
var ErrConflistUnknown = errors.New("its conflist cannot be read")

// Netconf returns the plugin entry in the network's conflist, and the file that it is in.
// Without one it returns the entry that the runtime handed over if that is allowed, and
// otherwise an error with a remedy. The last two arguments are the results of ReadConfDir.
func (p PluginFile) Netconf(network string, handed Netconf, conflists ConfDir, err error) (Netconf, string, error) {
	if list := conflists.WithEntry(network); list != nil {
		return list.Entries[0].Netconf, list.File, list.Entries[0].Err
	}
	if slices.Contains(p.AllowUnlisted, network) {
		return handed, "", nil
	}
	refuse := func(format string, args ...any) (Netconf, string, error) {
		return Netconf{}, "", fmt.Errorf("network %s"+format, append([]any{policy.Quote(network)}, args...)...)
	}
	file := policy.Printable(p.Path)
	if err != nil {
		return refuse(": %w: %w; write the runtime's directory as cni_conf_dir into %s", ErrConflistUnknown, err, file)
	}
	for _, list := range conflists.Conflists {
		if list.Network == network && list.Err == nil {
			return refuse(" may not contribute: its conflist %s has no plugin entry, and %s takes its policy from there; "+
				"add the entry, or the network to allow_unlisted_networks", policy.Printable(list.File), file)
		}
	}
	if err := conflists.Err(); err != nil {
		return refuse(": %w: %w; repair it", ErrConflistUnknown, err)
	}
	return refuse(" may not contribute: no conflist in %s has its plugin entry, and %s takes its policy from there; "+
		"write one, correct cni_conf_dir, or add the network to allow_unlisted_networks", policy.Printable(p.CNIConfDir), file)
}
