// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var (
	// ErrNoNetworks reports a directory without a network, or none, as before the main CNI plugin is
	// installed.
	ErrNoNetworks = errors.New("no network there yet")
	// ErrNetworkNotFound reports that the directory has networks, but not the named one.
	ErrNetworkNotFound = errors.New("no such network there")
	// ErrBroken reports that libcni cannot load a file that decides which network is used.
	ErrBroken = errors.New("a file there cannot be loaded")
	// ErrDelegate reports that it is unknown to which network Multus delegates.
	ErrDelegate = errors.New("the network that Multus delegates to is unknown, " +
		"so no plugin entry is inserted")
)

// Network is a network and the file that a runtime takes it from.
type Network struct {
	Path    string // in the directory; it may be a symlink
	Name    string
	Entries int // plugin entries in the file
	// Generated tells that ip-masq generated the list from another file, whose path is Original. Original is
	// "" if that file is gone, because the main CNI plugin was uninstalled. The list is then stale.
	// Editor.Find sets both.
	Generated bool
	Original  string
	Conflist  config.Conflist // what the file says

	// Multus is the path of the configuration of Multus through which the runtime uses the network, "" if
	// there is none. Multus generates it from the network's own file, so a plugin entry in it would be lost.
	Multus string
	// MultusErr is why pods do not get the network as its own file has it, until Multus generates its
	// configuration again.
	MultusErr error
}

// Find returns the network in a configuration directory that a runtime uses: the first file by name, or the
// first that has the named network. If this is Multus, it is the network that Multus delegates to, or
// ErrDelegate.
//
// A file that libcni cannot load is an ErrBroken if it is the first: containerd stops at it, CRI-O and podman
// go on. If a network is named, it is one only if no other file has that network. A list of "loopback" alone
// does not count.
func Find(dir, network string) (Network, error) {
	c, err := config.ReadConfDir(dir)
	return find(dir, network, c.Conflists, c.Conflists, err)
}

// Used returns the network of a directory that was read which a runtime uses, as Find does.
func Used(c config.ConfDir) (Network, error) { return findIn("", c.Conflists, c.Conflists, nil) }

// find finds the network in some of the files of a directory; err is the error of reading them. Multus may
// name a network by any file of the directory, also by one that is not among the lists.
func find(dir, network string, lists, all []config.Conflist, err error) (Network, error) {
	n, err := findIn(network, lists, all, err)
	if err != nil {
		what := strings.TrimSpace("the network " + policy.Printable(network))
		return Network{}, fmt.Errorf("find %s in %s: %w", what, policy.Printable(dir), err)
	}
	return n, nil
}

func findIn(network string, lists, all []config.Conflist, err error) (Network, error) {
	if errors.Is(err, fs.ErrNotExist) {
		return Network{}, fmt.Errorf("%w: the directory is missing; install the main CNI plugin, %s",
			ErrNoNetworks, otherDir)
	}
	if err != nil {
		return Network{}, err
	}
	n, err := pick(lists, network)
	if err != nil {
		return n, err
	}
	return throughMultus(lists, all, n)
}

const otherDir = "or name another directory with --cni-conf-dir or cni_conf_dir"

// pick returns the first network, or the first of that name. A configuration of Multus of that name
// comes last: Multus may have the name of the network that it delegates to.
func pick(lists []config.Conflist, network string) (Network, error) {
	if network == "" {
		return pickFirst(lists)
	}
	var broken error
	var names []string
	var multus *Network
	for _, list := range lists {
		n, err := asNetwork(list)
		if err != nil {
			broken = cmp.Or(broken, err)
			continue
		}
		if n.Name == network && !list.IsMultus() {
			return n, nil
		}
		if n.Name == network && multus == nil {
			multus = &n
			continue
		}
		if n.Name != "" {
			names = append(names, policy.Printable(n.Name))
		}
	}
	switch {
	case multus != nil:
		return *multus, nil
	case broken != nil:
		return Network{}, fmt.Errorf("%w, and none of the others has it; fix or remove it: %w",
			ErrBroken, broken)
	case len(names) > 0:
		return Network{}, fmt.Errorf("%w; name one of %s with --conflist-network, "+
			"or none for the one that the runtime uses",
			ErrNetworkNotFound, strings.Join(policy.First(8, names), ", "))
	}
	return Network{}, noNetworks()
}

func pickFirst(lists []config.Conflist) (Network, error) {
	for _, list := range lists {
		n, err := asNetwork(list)
		if err != nil {
			return Network{}, fmt.Errorf("%w; fix or remove it: %w", ErrBroken, err)
		}
		if n.Name != "" {
			return n, nil
		}
	}
	return Network{}, noNetworks()
}

func noNetworks() error {
	return fmt.Errorf("%w; install the main CNI plugin, %s", ErrNoNetworks, otherDir)
}

// asNetwork returns the network of a file; it has no name if no pod uses it.
func asNetwork(list config.Conflist) (Network, error) {
	n := Network{Path: list.File, Name: list.Network, Entries: len(list.Entries), Conflist: list}
	if list.Err != nil {
		return n, list.Err
	}
	isLoopback := len(list.Types) == 1 && list.Types[0] == "loopback"
	if isLoopback {
		n.Name = ""
		return n, nil
	}
	if list.Network == "" {
		return n, fmt.Errorf("%s: name: is missing; write the network's", policy.Printable(list.File))
	}
	return n, nil
}
