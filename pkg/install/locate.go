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
)

// Dirs are the directories of a container runtime: of its network configurations
// and of the plugins that it runs. "" is one that is not known.
type Dirs struct{ Conf, Bin string }

// ErrWhere says that the directories cannot be told from what is on the node.
var ErrWhere = errors.New("name them with --cni-conf-dir and --cni-bin-dir")

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
// ErrWhere.
func Locate(root string, stated Dirs) (Dirs, error) {
	if stated.Conf != "" && stated.Bin != "" {
		return stated, nil
	}
	return choose(among(stated),
		func(c candidate) bool { return works(root, c.Dirs) },
		func(c candidate) bool { return isDir(root, c.Bin) && isDir(root, c.Conf) },
		func(c candidate) bool { return isDir(root, c.Bin) },
	)
}

// LocateOurs finds the directories that are not stated by what Install has put
// there. Where there is nothing of ours they stay unknown.
func LocateOurs(root string, stated Dirs) (Dirs, error) {
	if stated.Conf != "" && stated.Bin != "" {
		return stated, nil
	}
	all := among(stated)
	hasBinary := func(c candidate) bool { return holdsOurs(filepath.Join(root, c.Bin)) }
	hasEntry := func(c candidate) bool { return named(filepath.Join(root, c.Conf)) }
	switch {
	case slices.ContainsFunc(all, hasBinary):
		return choose(all, func(c candidate) bool { return hasBinary(c) && hasEntry(c) }, hasBinary)
	case slices.ContainsFunc(all, hasEntry):
		for i := range all {
			all[i].Bin = stated.Bin
		}
		return choose(all, hasEntry)
	}
	return stated, nil
}

// choose returns the one pair that passes the first test which any passes.
func choose(all []candidate, tests ...func(candidate) bool) (Dirs, error) {
	const what = "find the directories of the container runtime"
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
			several = append(several, fmt.Sprintf("%s with %s (%s)", shown(d.Conf), shown(d.Bin), names[i]))
		}
		return Dirs{}, fmt.Errorf("%s: there are several: %s; %w", what, strings.Join(several, ", "), ErrWhere)
	}
	var names []string
	for _, c := range all {
		if !slices.Contains(names, c.distribution) {
			names = append(names, c.distribution)
		}
	}
	return Dirs{}, fmt.Errorf("%s: none of those known (%s) is there; %w", what, strings.Join(names, ", "), ErrWhere)
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
	isOurs := func(e os.DirEntry) bool { return e.Name() == config.PluginType || isTemp(e.Name()) }
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
