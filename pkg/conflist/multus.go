// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// multusConf has the members of a configuration, or of a list, that decide what Multus delegates to.
type multusConf struct {
	Name, Type, ClusterNetwork string
	Plugins, Delegates         []multusConf
}

// delegate returns the first delegate, which makes the pod's interface: a network, or the value of
// clusterNetwork. It also returns whether one of the two configurations has the plugin entry.
func (c multusConf) delegate() (to multusConf, hasEntry bool) {
	own := c
	if len(c.Plugins) > 0 {
		own = c.Plugins[0]
	}
	to.ClusterNetwork = own.ClusterNetwork
	if to.ClusterNetwork == "" && len(own.Delegates) > 0 {
		to = own.Delegates[0]
	}
	isEntry := func(p multusConf) bool { return p.Type == config.PluginType }
	return to, slices.ContainsFunc(slices.Concat(c.Plugins, to.Plugins), isEntry)
}

// throughMultus returns the network to which Multus delegates if the given one is a configuration of
// Multus. It sets Network.Multus if the runtime uses the network through Multus.
func throughMultus(lists, all []config.Conflist, found Network) (Network, error) {
	multus := found
	if !found.Conflist.IsMultus() {
		multus, _ = pick(lists, "")
	} else if found.Entries > 0 {
		return found, nil // inserted by an administrator: Multus writes none beside itself
	}
	if !multus.Conflist.IsMultus() {
		return found, nil
	}
	var conf multusConf
	err := json.Unmarshal(multus.Conflist.Doc, &conf)
	to, hasEntry := conf.delegate()
	target, errFind := to.find(lists, all)
	if err != nil {
		err = fmt.Errorf("write what Multus reads there: %s", policy.Printable(err.Error()))
	}
	switch err = cmp.Or(err, errFind); {
	case err == nil && (found.Conflist.IsMultus() || target.Name == found.Name):
		target.Multus = multus.Path
		if isCurrent := to.ClusterNetwork != "" && filepath.Base(to.ClusterNetwork) == filepath.Base(target.Path); !isCurrent && !hasEntry {
			target.MultusErr = fmt.Errorf("%s has a copy of network %s without the plugin entry, so pods start without the plugin: "+
				"restart Multus on the node, so that it generates the file again (with --cleanup-config-on-exit=true it does so by itself)",
				policy.Printable(multus.Path), policy.Printable(target.Name))
		}
		return target, nil
	case !found.Conflist.IsMultus(): // the caller named another network
		return found, nil
	case hasEntry:
		found.Entries = 1
		return found, nil
	}
	return found, fmt.Errorf("%s: %w: %w; or name the network with --conflist-network", policy.Printable(multus.Path), ErrDelegate, err)
}

func (c multusConf) find(lists, all []config.Conflist) (Network, error) {
	name := c.Name
	switch value := c.ClusterNetwork; {
	case value == "" && name == "":
		return Network{}, errors.New("neither clusterNetwork nor the first of delegates has its name")
	case value != "" && !strings.Contains(value, "/"):
		return Network{}, fmt.Errorf("clusterNetwork: Multus looks up %s in the cluster, or in a directory of its own: "+
			"put the plugin entry there", policy.Quote(value))
	case value != "":
		// The path is valid in the pod of Multus, not on the node.
		for _, list := range all {
			if filepath.Base(list.File) == filepath.Base(value) {
				name = list.Network
			}
		}
		if name == "" {
			return Network{}, fmt.Errorf("clusterNetwork: %s is not in this directory: name its directory with --cni-conf-dir", policy.Quote(value))
		}
	}
	n, err := pick(lists, name)
	if !errors.Is(err, ErrBroken) && (err != nil || n.Conflist.IsMultus()) {
		err = fmt.Errorf("no other file of this directory has network %s", policy.Quote(name))
	}
	return n, err
}

// MultusFiles returns the base names of the files that Multus reads on each ADD as its clusterNetwork.
func MultusFiles(dir string) []string {
	c, _ := config.ReadConfDir(dir) // Editor.Remove reports the error
	var files []string
	for _, list := range c.Conflists {
		var conf multusConf
		if list.IsMultus() && json.Unmarshal(list.Doc, &conf) == nil {
			to, _ := conf.delegate()
			files = append(files, filepath.Base(to.ClusterNetwork)) // "." for none
		}
	}
	return files
}
