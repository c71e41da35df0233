// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// party is a program that writes conflists, and what to do so that it leaves our
// entry in.
type party struct{ name, remedy string }

// parties are those whose files are known by what is in them: the type of a
// plugin, or a piece of the file's name.
func parties() []struct {
	types []string
	file  string
	party
} {
	return []struct {
		types []string
		file  string
		party
	}{
		{[]string{"cilium-cni"}, "cilium", party{"Cilium", "set cni.exclusive=false in its Helm values (cni-exclusive: \"false\" in its ConfigMap)"}},
		{nil, "kindnet", party{"kindnet", "its conflist is compiled in, without the plugin entry, and written at each start, and by some versions whenever the Node object changes"}},
		{[]string{"calico"}, "calico", party{"Calico's install-cni", "put our entry into cni_network_config of the ConfigMap calico-config"}},
		{[]string{"flannel"}, "flannel", party{"flannel's install-cni", "put our entry into cni-conf.json of the ConfigMap kube-flannel-cfg"}},
	}
}

// suspect returns who most likely removes our entry from a network's file.
func suspect(n Network) party {
	if names := setAside(filepath.Dir(n.Path)); len(names) > 0 {
		return parties()[0].party
	}
	var types []string
	if list, err := parseList(n.Doc); err == nil && !n.Single {
		for _, p := range list.plugins {
			types = append(types, p.Type)
		}
	} else if conf, err := parseSingle(n.Doc); err == nil {
		types = append(types, conf.Type)
	}
	for _, p := range parties() {
		named := strings.Contains(filepath.Base(n.Path), p.file) || n.Name == p.file
		if named || slices.ContainsFunc(types, func(t string) bool { return slices.Contains(p.types, t) }) {
			return p.party
		}
	}
	return party{"the program that installs the main CNI plugin", "make it write our entry too, or write the file once only"}
}

// setAside returns the names of files that Cilium has renamed so that no runtime
// loads them, as it does with cni.exclusive=true.
func setAside(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // who looks for the network says so
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".cilium_bak") {
			names = append(names, e.Name())
		}
	}
	return names
}
