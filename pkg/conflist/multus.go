// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ErrDelegate says that the runtime uses Multus, and that the network to which
// Multus delegates cannot be told.
var ErrDelegate = errors.New("the network that Multus delegates to cannot be told, so no plugin entry is added")

// Multus is a configuration of Multus through which a runtime uses a network.
// Multus generates it from the network's own file: an entry in it would be lost, and
// what stands before it in the directory may become a part of it.
type Multus struct {
	Path string
	// Depth is how many configurations of Multus are in each other; 1 is right.
	Depth int
	// Lacks says that pods get the network without its plugin entry until Multus
	// has generated the configuration again.
	Lacks bool

	made bool // FromConf made it
	doc  []byte
}

// Err returns why pods do not get the network as its own file has it, or nil.
func (m *Multus) Err(network string) error {
	const restart = "restart Multus on the node, so that it generates the file again"
	switch {
	case m == nil:
		return nil
	case m.Depth > 1:
		return fmt.Errorf("%s: Multus is nested %d levels deep, and each pod runs all of them: %s", policy.Printable(m.Path), m.Depth, restart)
	case m.Lacks:
		return fmt.Errorf("%s has a copy of network %s without the plugin entry, so pods start without the plugin: %s "+
			"(with --cleanup-config-on-exit=true it does so by itself)", policy.Printable(m.Path), policy.Printable(network), restart)
	}
	return nil
}

// multusConf is what a network configuration, or a list of them, says of whom
// Multus delegates to.
type multusConf struct {
	Name, Type, ClusterNetwork string
	Plugins, Delegates         []multusConf
}

// delegate follows nested configurations of Multus to what the innermost one
// delegates to first, which makes the pod's interface: a network, or the value of
// its clusterNetwork. It returns whether the plugin runs on the way.
func (c multusConf) delegate() (to multusConf, depth int, runsPlugin bool) {
	for {
		own := c
		if len(c.Plugins) > 0 {
			own = c.Plugins[0]
		}
		for _, p := range c.Plugins {
			runsPlugin = runsPlugin || p.Type == config.PluginType
		}
		switch {
		case !config.IsMultus(own.Type):
			return c, depth, runsPlugin
		case own.ClusterNetwork != "", len(own.Delegates) == 0:
			return multusConf{ClusterNetwork: own.ClusterNetwork}, depth + 1, runsPlugin
		}
		c, depth = own.Delegates[0], depth+1
	}
}

// throughMultus returns the network that a runtime uses where the found one is a
// configuration of Multus. It takes note of Multus where the found one is what the
// runtime uses through it.
func throughMultus(lists []config.Conflist, found Network) (Network, error) {
	multus := found
	if !found.isMultus {
		multus, _ = pick(lists, "")
	} else if found.Entries > 0 && !found.Made {
		return found, nil // Multus writes none: the entry was put there by hand
	}
	if !multus.isMultus {
		return found, nil
	}
	var conf multusConf
	err := json.Unmarshal(multus.Doc, &conf)
	if err != nil {
		err = fmt.Errorf("write what Multus reads there: %s", policy.Printable(err.Error()))
	}
	to, depth, runsPlugin := conf.delegate()
	var target Network
	if err == nil {
		target, err = to.find(lists)
	}
	switch reaches := err == nil && (found.isMultus || target.Name == found.Name); {
	case reaches:
		current := to.ClusterNetwork != "" && filepath.Base(to.ClusterNetwork) == filepath.Base(target.Path)
		target.Multus = &Multus{Path: multus.Path, Depth: depth, Lacks: !runsPlugin && !current, made: multus.Made, doc: multus.Doc}
		return target, nil
	case !found.isMultus:
		return found, nil // another network is named
	case runsPlugin && !found.Made:
		found.Entries = 1
		return found, nil
	}
	return found, fmt.Errorf("%s: %w: %w; or name the network with --conflist-network", policy.Printable(multus.Path), ErrDelegate, err)
}

// MultusFiles returns the base names of the files that configurations of Multus in a
// directory have as their clusterNetwork: Multus reads them on each ADD.
func MultusFiles(dir string) []string {
	c, err := config.ReadConfDir(dir)
	if err != nil {
		return nil // Withdraw reports it
	}
	var files []string
	for _, list := range c.Conflists {
		var conf multusConf
		doc, err := readFile(list.File)
		if err != nil || !list.IsMultus() || json.Unmarshal(doc, &conf) != nil {
			continue
		}
		if to, _, _ := conf.delegate(); to.ClusterNetwork != "" {
			files = append(files, filepath.Base(to.ClusterNetwork))
		}
	}
	return files
}

// find returns the network that Multus delegates to.
func (c multusConf) find(lists []config.Conflist) (Network, error) {
	name := c.Name
	switch value := c.ClusterNetwork; {
	case value == "" && name == "":
		return Network{}, errors.New("neither clusterNetwork nor the first of delegates has its name")
	case value != "" && !strings.Contains(value, "/"):
		return Network{}, fmt.Errorf("clusterNetwork: Multus looks up %s in the cluster, or in a directory of its own: "+
			"put the plugin entry there", policy.Quote(value))
	case value != "":
		// The path is that in Multus's pod.
		for _, list := range lists {
			if filepath.Base(list.File) == filepath.Base(value) {
				name = list.Network
			}
		}
		if name == "" {
			return Network{}, fmt.Errorf("clusterNetwork: %s is not in this directory: name its directory with --cni-conf-dir", policy.Quote(value))
		}
	}
	n, err := pick(lists, name)
	switch {
	case errors.Is(err, ErrBroken):
		return n, err
	case err != nil || n.isMultus:
		return n, fmt.Errorf("no other file of this directory has network %s", policy.Quote(name))
	}
	return n, nil
}
