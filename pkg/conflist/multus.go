// SPDX-License-Identifier: Apache-2.0

package conflist

import (
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

// delegate returns what Multus delegates to first, which makes the pod's interface: a configuration with only
// the value of clusterNetwork or, without one, the first of delegates. It also returns whether that
// configuration, or the one of Multus, has the plugin entry.
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

// throughMultus returns the network to which Multus delegates if the given one is a configuration of Multus.
// It sets Network.Multus if the runtime uses the network through Multus. The entry never goes into a file of
// Multus: thin Multus copies the file that it finds, and would nest the entry once more at each restart.
func throughMultus(lists, all []config.Conflist, found Network) (Network, error) {
	if found.Conflist.IsMultus() {
		if found.Entries > 0 {
			return found, nil // inserted by an administrator: Multus writes none beside itself
		}
		return delegated(lists, all, found)
	}
	first, err := pickFirst(lists)
	isThrough := err == nil && first.Conflist.IsMultus()
	if !isThrough {
		return found, nil
	}
	target, err := delegated(lists, all, first)
	isFound := err == nil && target.Name == found.Name && !target.Conflist.IsMultus()
	if !isFound { // the caller named another network
		return found, nil
	}
	return target, nil
}

// delegated returns the network to which Multus delegates, or that of Multus with an entry if that is in its
// file.
func delegated(lists, all []config.Conflist, multus Network) (Network, error) {
	var conf multusConf
	decodeErr := json.Unmarshal(multus.Conflist.Doc, &conf)
	to, hasEntry := conf.delegate() // by what could be decoded
	target, err := to.find(lists, all)
	if decodeErr != nil {
		err = fmt.Errorf("write what Multus reads there: %s", policy.Printable(decodeErr.Error()))
	}
	if err != nil && hasEntry { // an administrator wrote it there, and it is as good as one in a file
		multus.Entries = 1
		return multus, nil
	}
	if err != nil {
		return multus, fmt.Errorf("%s: %w: %w; or name the network with --conflist-network",
			policy.Printable(multus.Path), ErrDelegate, err)
	}
	target.Multus = multus.Path
	readsFile := to.ClusterNetwork != "" && filepath.Base(to.ClusterNetwork) == filepath.Base(target.Path)
	if !readsFile && !hasEntry {
		target.MultusErr = fmt.Errorf("%s has a copy of network %s without the plugin entry, so pods start "+
			"without the plugin: restart Multus on the node, so that it generates the file again "+
			"(with --cleanup-config-on-exit=true it does so by itself)",
			policy.Printable(multus.Path), policy.Printable(target.Name))
	}
	return target, nil
}

// find returns the network that a configuration of Multus names.
func (c multusConf) find(lists, all []config.Conflist) (Network, error) {
	name, err := c.networkName(all)
	if err != nil {
		return Network{}, err
	}
	n, err := pick(lists, name)
	if errors.Is(err, ErrBroken) {
		return n, err
	}
	if err != nil || n.Conflist.IsMultus() {
		return n, fmt.Errorf("no other file of this directory has network %s", policy.Quote(name))
	}
	return n, nil
}

func (c multusConf) networkName(all []config.Conflist) (string, error) {
	value := c.ClusterNetwork
	if value == "" && c.Name == "" {
		return "", errors.New("neither clusterNetwork nor the first of delegates has its name")
	}
	if value == "" {
		return c.Name, nil
	}
	if !strings.Contains(value, "/") {
		return "", fmt.Errorf("clusterNetwork: Multus looks up %s in the cluster, "+
			"or in a directory of its own: put the plugin entry there", policy.Quote(value))
	}
	name := c.Name
	for _, list := range all { // the path is valid in the pod of Multus, not on the node
		if filepath.Base(list.File) == filepath.Base(value) {
			name = list.Network
		}
	}
	if name == "" {
		return "", fmt.Errorf("clusterNetwork: %s is not in this directory: "+
			"name its directory with --cni-conf-dir", policy.Quote(value))
	}
	return name, nil
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
