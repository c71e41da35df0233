// SPDX-License-Identifier: Apache-2.0

package install

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Dirs are the directories of a container runtime: of its network configurations
// and of the plugins that it runs. "" is one that is not known.
type Dirs struct{ Conf, Bin string }

// ErrWhere says that the directories cannot be told from what is on the node.
var ErrWhere = errors.New("name them with --cni-conf-dir and --cni-bin-dir")

const locating = "find the directories of the container runtime" // in errors

// candidate is a pair that some distribution of Kubernetes has.
type candidate struct {
	distribution string
	Dirs
}

// candidates are the known pairs; of one distribution, the better one first.
//
// Sources: the defaults of containerd and CRI-O; GKE's and OpenShift's node
// configuration; the directories that k3s and microk8s write into the
// configuration of their containerd.
func candidates() []candidate {
	const k3s, microk8s = "/var/lib/rancher/k3s", "/var/snap/microk8s/current"
	return []candidate{
		{"the usual", Dirs{config.DefaultCNIConfDir, "/opt/cni/bin"}},
		{"GKE", Dirs{config.DefaultCNIConfDir, "/home/kubernetes/bin"}},
		{"k3s", Dirs{k3s + "/agent/etc/cni/net.d", k3s + "/data/cni"}},
		{"k3s", Dirs{k3s + "/agent/etc/cni/net.d", k3s + "/data/current/bin"}},
		{"microk8s", Dirs{microk8s + "/args/cni-network", microk8s + "/opt/cni/bin"}},
		{"OpenShift", Dirs{"/run/multus/cni/net.d", "/var/lib/cni/bin"}}, // to which Multus delegates
		{"OpenShift", Dirs{"/etc/kubernetes/cni/net.d", "/var/lib/cni/bin"}},
	}
}

// among returns the candidates that have what is stated. A directory that no
// distribution has can belong to any.
func among(stated Dirs) []candidate {
	all := candidates()
	for _, d := range []struct {
		stated string
		of     func(*candidate) *string
	}{
		{stated.Conf, func(c *candidate) *string { return &c.Conf }},
		{stated.Bin, func(c *candidate) *string { return &c.Bin }},
	} {
		if d.stated == "" {
			continue
		}
		differs := func(c candidate) bool { return *d.of(&c) != d.stated }
		if slices.ContainsFunc(all, func(c candidate) bool { return !differs(c) }) {
			all = slices.DeleteFunc(all, differs)
		}
		for i := range all {
			*d.of(&all[i]) = d.stated
		}
	}
	return all
}

// Locate finds the directories that are not stated, by what is below a root
// directory, "/" on a node: those whose plugins the runtime's network names, or
// else, on a node that boots before its main CNI plugin is installed, those that
// are there. Where none are, or those of several distributions, the error is an
// ErrWhere. A stated directory of plugins has to be there, as Put makes none.
func Locate(root string, stated Dirs) (Dirs, error) {
	if stated.Conf != "" && stated.Bin != "" {
		return stated, nil
	}
	if stated.Bin != "" && !isDir(root, stated.Bin) {
		return Dirs{}, fmt.Errorf("%s: there is no directory %s; make it, or name the runtime's with --cni-bin-dir", locating, policy.Printable(stated.Bin))
	}
	return choose(among(stated),
		func(c candidate) bool { return works(root, c.Dirs) },
		func(c candidate) bool { return isDir(root, c.Bin) && isDir(root, c.Conf) },
		func(c candidate) bool { return isDir(root, c.Bin) },
	)
}

// Places are all directories in which something of ours may be, as Dirs has one
// of each.
type Places struct{ Confs, Bins []string }

// Ours returns the directories to look in for what Install has put there: those
// that are stated, and in the place of others all that go with them. What is found
// decides nothing, since an uninstall that is begun anew finds less.
func Ours(stated Dirs) Places {
	var p Places
	for _, c := range among(stated) {
		for dir, to := range map[string]*[]string{c.Conf: &p.Confs, c.Bin: &p.Bins} {
			if !slices.Contains(*to, dir) {
				*to = append(*to, dir)
			}
		}
	}
	return p
}

// HaveAny reports whether there is an entry, or a plugin, or what a killed Put
// has left.
func (p Places) HaveAny() bool {
	return slices.ContainsFunc(p.Confs, named) || slices.ContainsFunc(p.Bins, holdsOurs)
}

// choose returns the one pair that passes the first test which any passes.
func choose(all []candidate, tests ...func(candidate) bool) (Dirs, error) {
	for _, passes := range tests {
		var names []string
		var found []Dirs
		for _, c := range all {
			again := slices.Contains(names, c.distribution) || slices.Contains(found, c.Dirs)
			if again || !passes(c) {
				continue
			}
			names, found = append(names, c.distribution), append(found, c.Dirs)
		}
		switch len(found) {
		case 0:
			continue
		case 1:
			return found[0], nil
		}
		var several []string
		for i, d := range found {
			several = append(several, fmt.Sprintf("%s with %s (%s)", policy.Printable(d.Conf), policy.Printable(d.Bin), names[i]))
		}
		return Dirs{}, fmt.Errorf("%s: there are several: %s; %w", locating, strings.Join(several, ", "), ErrWhere)
	}
	var names []string
	for _, c := range all {
		if !slices.Contains(names, c.distribution) {
			names = append(names, c.distribution)
		}
	}
	return Dirs{}, fmt.Errorf("%s: none of those known (%s) is there; %w", locating, strings.Join(names, ", "), ErrWhere)
}

// works reports whether the plugins of the network that a runtime picks are in
// the directory: a pair of directories that belong together.
func works(root string, d Dirs) bool {
	n, err := conflist.Find(filepath.Join(root, d.Conf), "")
	if err != nil {
		return false
	}
	var list struct {
		Type    string
		Plugins []struct{ Type string }
	}
	if err := json.Unmarshal(n.Doc, &list); err != nil {
		return false
	}
	types := []string{list.Type}
	for _, p := range list.Plugins {
		types = append(types, p.Type)
	}
	types = slices.DeleteFunc(types, func(t string) bool { return t == "" || t == config.PluginType })
	absent := func(t string) bool { return !exists(root, filepath.Join(d.Bin, filepath.Base(t))) }
	return len(types) > 0 && !slices.ContainsFunc(types, absent)
}

// holdsOurs reports whether the plugin is in a directory, or what a killed Put has
// left there.
func holdsOurs(dir string) bool {
	entries, err := os.ReadDir(dir)
	isOurs := func(e os.DirEntry) bool { return e.Name() == config.PluginType || safefile.IsTemp(e.Name()) }
	return err == nil && slices.ContainsFunc(entries, isOurs)
}

// named reports whether a conflist of the directory has an entry of ours.
func named(dir string) bool {
	c, err := config.ReadConfDir(dir)
	has := func(l config.Conflist) bool { return len(l.Entries) > 0 }
	return err == nil && slices.ContainsFunc(c.Conflists, has)
}

func isDir(root, path string) bool {
	info, err := os.Stat(filepath.Join(root, path))
	return err == nil && info.IsDir()
}

// exists takes symlinks for what they are: in a container they may lead to what
// is not mounted there.
func exists(root, path string) bool {
	_, err := os.Lstat(filepath.Join(root, path))
	return err == nil
}
