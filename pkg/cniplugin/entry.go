// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/types/create"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/podinfo"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// networkConf is the configuration that states the network's policy, or why there is none.
type networkConf struct {
	netconf config.Netconf
	err     error
	// stdinDiffers: stdin is neither what the conflist has, which counts because of plugin.toml, nor what it
	// had in this boot.
	stdinDiffers bool
}

// findNetconf returns the configuration that states the network's policy: that on stdin or, if
// there is a plugin.toml, the plugin entry of the network's conflist. Anybody can choose what is on stdin.
func (n *node) findNetconf() networkConf {
	isObject := n.netconf.Err() == nil
	if !n.pluginFile.Present || !isObject { // validEntry returns that error
		return networkConf{netconf: n.netconf}
	}
	if n.pluginFileErr != nil {
		return networkConf{netconf: n.netconf, err: n.pluginFileErr}
	}
	conflists, readErr := n.readConfDir()
	inConflist, file, err := n.pluginFile.Netconf(n.network, conflists, readErr)
	keys := n.netconf.Differences(inConflist)
	if err == nil && len(keys) > 0 {
		n.Warn(n.differenceErr(keys, file))
	}
	differs := err != nil || len(keys) > 0
	return networkConf{
		netconf:      inConflist,
		err:          err,
		stdinDiffers: differs && !n.Dir.HadEntry(n.network, n.netconf.Statements()),
	}
}

func (n *node) differenceErr(keys []string, file string) error {
	const most = 8
	for i, key := range keys {
		keys[i] = policy.Printable(key)
	}
	return fmt.Errorf("network %s: the configuration on stdin differs in %s from the plugin entry in %s, "+
		"which is in force because of %s; write the policy there",
		policy.Quote(n.network), strings.Join(policy.First(most, keys), ", "),
		policy.Printable(file), policy.Printable(n.pluginFile.Path))
}

// rememberEntry records the entry that the conflist has because of plugin.toml: in this boot the runtime may
// go on with it after the conflist has another one.
func (n *node) rememberEntry(c networkConf) {
	if n.pluginFile.Present && c.err == nil {
		n.Warn(n.Dir.AddEntry(n.network, c.netconf.Statements()))
	}
}

// validEntry returns the network's entry if it is valid. While the network's conflist cannot be
// read, its last good policy stays in force.
func (n *node) validEntry(c networkConf) (config.Entry, error) {
	if c.err != nil {
		return n.lastGoodEntry(c.err)
	}
	entry, err := c.netconf.Entry()
	if err == nil {
		return entry, nil
	}
	code := types.ErrInvalidNetworkConfig
	if errors.Is(err, config.ErrNotJSON) {
		code = types.ErrDecodingFailure
	}
	return entry, withCode(code, fmt.Errorf("entry of network %s: %w", policy.Quote(entry.Network), err))
}

// lastGoodEntry returns an entry with the stored policy of the network, if its conflist is in a file that
// cannot be read.
func (n *node) lastGoodEntry(cause error) (config.Entry, error) {
	refused := withCode(types.ErrInvalidNetworkConfig, cause)
	if !errors.Is(cause, config.ErrConflistUnknown) {
		return config.Entry{}, refused
	}
	state, err := n.Dir.Load()
	stored := state.Find(n.source())
	if err != nil || stored == nil || stored.ConfDir != n.pluginFile.CNIConfDir {
		return config.Entry{}, refused
	}
	n.Warn(fmt.Errorf("%w (until it can be read, the last good policy of the network stays in force)", cause))
	return config.Entry{Network: n.network, Policy: stored.Policy}, nil
}

// readConfDir reads the runtimes' configuration directory. One that does not exist is no reason to warn.
func (n *node) readConfDir() (config.ConfDir, error) {
	confs, err := config.ReadConfDir(n.pluginFile.CNIConfDir)
	if !errors.Is(err, os.ErrNotExist) {
		n.Warn(err)
	}
	return confs, err
}

// result parses prevResult. The second value is what ADD prints: prevResult with all its keys, in the
// version of the configuration (CNI spec, section 4).
func (n *node) result() (types.Result, []byte, error) {
	const see = "see what the plugin before ip-masq in the conflist returns"
	text := n.netconf.Value("prevResult")
	if len(text) == 0 || string(text) == "null" {
		return nil, nil, errors.New("prevResult: is missing; ip-masq runs after the plugin that makes " +
			"the interface: list it behind that one in the conflist's plugins")
	}
	version := cmp.Or(n.cniVersion, "0.1.0") // of a configuration without a version
	result, given, err := parseResult(text, version)
	if err != nil {
		return nil, nil, fmt.Errorf("prevResult: is not a result of cniVersion %s: %s; %s",
			policy.Printable(given), policy.Printable(err.Error()), see)
	}
	if given == version {
		output, err := withVersion(text, version)
		return result, output, err
	}
	converted, err := podinfo.Convert(result, version)
	if err != nil {
		return nil, nil, fmt.Errorf("prevResult: convert from cniVersion %s to %s: %w; %s",
			given, version, err, see)
	}
	var output bytes.Buffer
	err = converted.PrintTo(&output)
	return result, output.Bytes(), err
}

// parseResult parses a result, and returns its version: in a configuration of the first two versions it need
// not state one.
func parseResult(text json.RawMessage, version string) (result types.Result, given string, err error) {
	var head struct {
		CNIVersion string `json:"cniVersion"`
	}
	err = json.Unmarshal(text, &head)
	given = cmp.Or(head.CNIVersion, version)
	isOptional := version == "0.1.0" || version == "0.2.0"
	if err == nil && head.CNIVersion == "" && !isOptional {
		err = errors.New("it has no cniVersion")
	}
	if err == nil {
		result, err = create.Create(given, text)
	}
	if wrong, is := errors.AsType[*json.UnmarshalTypeError](err); is {
		err = fmt.Errorf("%s has the JSON type %s", cmp.Or(wrong.Field, "it"), wrong.Value)
	}
	return result, given, err
}

// withVersion returns a result with this version, and everything else as it is. It is not indented: a line of
// a deeply nested value would be as long as that is deep.
func withVersion(text json.RawMessage, version string) ([]byte, error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(text, &keys); err != nil {
		return nil, err
	}
	quoted, err := json.Marshal(version)
	if err != nil {
		return nil, err
	}
	keys["cniVersion"] = quoted
	return json.Marshal(keys)
}

// podSubnets returns the subnets of the pod's addresses. Addresses without a subnet and those with a mask
// shorter than any pod network's have none: users who are not administrators may choose the address (Multus).
func podSubnets(addresses []net.IPNet) []netip.Prefix {
	const shortest, shortestIPv6, most = 8, 32, 16
	var subnets []netip.Prefix
	for _, n := range addresses {
		a := podinfo.Address(n)
		least := shortest
		if a.Is6() {
			least = shortestIPv6
		}
		ones, bits := n.Mask.Size()
		isSubnet := bits == a.BitLen() && least <= ones && ones < bits
		if isSubnet && len(subnets) < most {
			subnets = append(subnets, netip.PrefixFrom(a, ones).Masked())
		}
	}
	return subnets
}

// podOf returns the pod of an attachment: its names in CNI_ARGS, and its addresses.
func podOf(a store.Attachment, cniArgs string, networks []net.IPNet) store.Pod {
	pod := store.Pod{Attachment: a, Addresses: podinfo.Addresses(networks)}
	pod.Namespace, pod.Name = podinfo.Names(cniArgs)
	return pod
}
