// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"errors"
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// findNetconf returns what states the network's policy: the configuration that
// the runtime handed over or, where there is a plugin.toml, the plugin entry of
// the network's conflist. The name alone proves nothing: whoever writes the
// configuration chooses it.
func (n *node) findNetconf(handed config.Netconf) (config.Netconf, error) {
	if !n.guard.Present || !handed.IsObject() { // Entry tells what is wrong with it
		return handed, nil
	}
	if n.guardErr != nil {
		return handed, n.guardErr
	}
	if err := n.guard.Admits(n.network); err != nil {
		return handed, err
	}
	conf, file, err := n.guard.Netconf(n.network, handed, n.disk.load(), n.disk.err)
	if keys := handed.Differences(conf); err == nil && file != "" && len(keys) > 0 {
		const most = 8
		for i, key := range keys {
			keys[i] = policy.Printable(key)
		}
		n.Warn(fmt.Errorf("network %s: what the runtime hands over differs in %s from the plugin entry in %s, which is in force because of %s; write the policy there",
			policy.Quote(n.network), strings.Join(keys[:min(most, len(keys))], ", "), policy.Printable(file), policy.Printable(n.guard.Path)))
	}
	return conf, err
}

// judge returns what the network's configuration says. While its conflist cannot
// be read, its last good policy stays in force.
func (n *node) judge() (config.Entry, error) {
	conf, err := n.netconf()
	if err == nil {
		entry, err := conf.Entry()
		if err != nil {
			err = withCode(codeOfConfig(err), fmt.Errorf("entry of network %s: %w", policy.Quote(entry.Network), err))
		}
		return entry, err
	}
	if errors.Is(err, config.ErrConflistUnknown) {
		if state, errLoad := n.Dir.Load(); errLoad == nil && state.Find(n.source()) != nil {
			n.Warn(fmt.Errorf("%w (until then its last good policy stays in force)", err))
			return config.Entry{Network: n.network, Policy: state.Find(n.source()).Policy}, nil
		}
	}
	return config.Entry{}, withCode(types.ErrInvalidNetworkConfig, err)
}

// fingerprint tells one configuration and program from others; it is "" for a
// configuration that was not read.
func (n *node) fingerprint() string {
	conf, err := n.netconf()
	if err != nil {
		return ""
	}
	return store.Fingerprint(append(conf.Telling(), n.plugin.Program)...)
}
