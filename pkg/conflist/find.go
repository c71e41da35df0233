// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var (
	// ErrNone says that a directory has no network yet, or is not there yet: a
	// node boots before its main CNI plugin is installed.
	ErrNone = errors.New("no network there yet")
	// ErrNotThere says that the directory has networks, but not the named one.
	ErrNotThere = errors.New("no such network there")
	// ErrBroken says that a file stands in the way which libcni cannot load.
	ErrBroken = errors.New("a file there cannot be loaded")
)

// Network is the file that a runtime takes a network from.
type Network struct {
	Path string // in the directory; it may be a symlink
	Name string
	Doc  []byte // its text
	// Single says that it is a single plugin's configuration: FromConf makes a
	// list of it, for ListPath(Path).
	Single bool
	// Entries is how many entries of ours the network has, in the file and in the
	// folder of its name.
	Entries int
	// Made says that it is a list which FromConf made. It is of no use without the
	// Original, "" where that is gone: the main CNI plugin is uninstalled.
	Made     bool
	Original string
	// Multus is what the runtime uses the network through, or nil.
	Multus *Multus

	isMultus bool
	position error // of its entry
}

// Find returns the file of the network in a configuration directory that a
// runtime uses: the first by name of those ending in .conf, .conflist and .json,
// or, where a network is named, the first of these that has it. Of a configuration
// of Multus it returns the network that this delegates to, or an ErrDelegate.
//
// A file that cannot be loaded is an ErrBroken where it is the first: containerd
// stops at it, while CRI-O and podman go on, so nobody knows what is used. Where
// a network is named, it is one if no other file has that network.
func Find(dir, network string) (Network, error) {
	n, err := find(dir, network)
	if err != nil {
		what := "the network"
		if network != "" {
			what += " " + policy.Printable(network)
		}
		return Network{}, fmt.Errorf("find %s in %s: %w", what, policy.Printable(dir), err)
	}
	return n, nil
}

const otherDir = "or name another directory with --cni-conf-dir"

func find(dir, network string) (Network, error) {
	c, err := config.ReadConfDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Network{}, fmt.Errorf("%w: the directory is missing; install the main CNI plugin, %s", ErrNone, otherDir)
	case err != nil:
		return Network{}, err
	}
	n, err := pick(c.Conflists, network)
	if err != nil {
		return n, err
	}
	return throughMultus(c.Conflists, n)
}

// pick returns the first network, or the first that has the name. One of Multus
// that has it comes last: Multus may give it the name of what it delegates to.
func pick(lists []config.Conflist, network string) (Network, error) {
	var broken error
	var names []string
	var multus *Network
	for _, list := range lists {
		var n Network
		err := list.Err
		if err == nil {
			n, err = load(list)
		}
		if errors.Is(err, fs.ErrNotExist) {
			if err = absent(list.File, err); err == nil {
				continue
			}
		}
		switch {
		case err != nil && network == "":
			return Network{}, fmt.Errorf("%w; mend or remove it: %w", ErrBroken, err)
		case err != nil && broken == nil:
			broken = err
		case err != nil:
		case network != "" && n.Name == network && n.isMultus && multus == nil:
			multus = &n
		case network != "" && n.Name == network, network == "" && n.Name != "":
			return n, nil
		case n.Name != "":
			names = append(names, policy.Printable(n.Name))
		}
	}
	switch {
	case multus != nil:
		return *multus, nil
	case broken != nil:
		return Network{}, fmt.Errorf("%w, and none of the others has it; mend or remove it: %w", ErrBroken, broken)
	case len(names) > 0:
		const mostNamed = 8
		return Network{}, fmt.Errorf("%w; name one of %s with --conflist-network, or none for the one that the runtime uses",
			ErrNotThere, strings.Join(names[:min(len(names), mostNamed)], ", "))
	}
	return Network{}, fmt.Errorf("%w; install the main CNI plugin, %s", ErrNone, otherDir)
}

// load reads the file of a list once more, for its text. What nobody uses as
// a pods' network has no name.
func load(list config.Conflist) (Network, error) {
	n := Network{Path: list.File, Single: !isListFile(list.File), Entries: len(list.Entries), isMultus: list.IsMultus(), position: list.PositionErr()}
	doc, err := readFile(list.File)
	if err != nil {
		return n, err
	}
	n.Doc = doc
	var plugins []types.PluginConf
	if n.Single {
		conf, err := parseSingle(doc)
		if err != nil {
			return n, fmt.Errorf("%s: %w", policy.Printable(list.File), err)
		}
		n.Name, plugins = conf.Name, []types.PluginConf{conf}
	} else {
		conf, err := parseList(doc)
		if err != nil {
			return n, fmt.Errorf("%s: %w", policy.Printable(list.File), err)
		}
		n.Name, plugins = conf.name, conf.plugins
		n.Made = isMade(list.File, conf)
	}
	if n.Made {
		n.Original = original(n.Path)
	}
	if len(plugins) == 1 && plugins[0].Type == "loopback" {
		return Network{}, nil
	}
	if n.Name == "" {
		return n, fmt.Errorf("%s: name: is missing; write the network's", policy.Printable(list.File))
	}
	return n, nil
}

// loadable returns the names, sorted, of what runtimes load in a directory.
func loadable(dir string) ([]string, error) {
	c, err := config.ReadConfDir(dir)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(c.Conflists))
	for i, list := range c.Conflists {
		names[i] = filepath.Base(list.File)
	}
	return names, nil
}
