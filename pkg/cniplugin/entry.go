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

// findNetconf returns the configuration that states the network's policy: that on stdin or, if
// there is a plugin.toml, the plugin entry of the network's conflist. Anybody can choose what is on stdin.
func (n *node) findNetconf() (config.Netconf, error) {
	if isObject := n.netconf.Err() == nil; !n.pluginFile.Present || !isObject { // Entry returns that error
		return n.netconf, nil
	}
	if n.pluginFileErr != nil {
		return n.netconf, n.pluginFileErr
	}
	confs := n.confDir()
	conf, file, err := n.pluginFile.Netconf(n.network, confs, n.confsErr)
	keys := n.netconf.Differences(conf)
	n.stdinDiffers = (err != nil || len(keys) > 0) && !n.Dir.HadEntry(n.network, n.netconf.Statements())
	if err == nil && len(keys) > 0 {
		const most = 8
		for i, key := range keys {
			keys[i] = policy.Printable(key)
		}
		n.Warn(fmt.Errorf("network %s: the configuration on stdin differs in %s from the plugin entry in %s, which is in force because of %s; write the policy there",
			policy.Quote(n.network), strings.Join(policy.First(most, keys), ", "), policy.Printable(file), policy.Printable(n.pluginFile.Path)))
	}
	return conf, err
}

// rememberEntry records the entry that the conflist has because of plugin.toml: in this boot the runtime may go on with
// it after the conflist has another one.
func (n *node) rememberEntry() {
	if entry, err := n.netconfInForce(); err == nil && n.pluginFile.Present {
		n.Warn(n.Dir.AddEntry(n.network, entry.Statements()))
	}
}

// validEntry returns the network's entry if it is valid. While the network's conflist cannot be
// read, its last good policy stays in force.
func (n *node) validEntry() (config.Entry, error) {
	conf, err := n.netconfInForce()
	if err == nil {
		entry, err := conf.Entry()
		if err != nil {
			code := types.ErrInvalidNetworkConfig
			if errors.Is(err, config.ErrNotJSON) {
				code = types.ErrDecodingFailure
			}
			err = withCode(code, fmt.Errorf("entry of network %s: %w", policy.Quote(entry.Network), err))
		}
		return entry, err
	}
	if errors.Is(err, config.ErrConflistUnknown) {
		state, errLoad := n.Dir.Load()
		if stored := state.Find(n.source()); errLoad == nil && stored != nil && stored.ConfDir == n.pluginFile.CNIConfDir {
			n.Warn(fmt.Errorf("%w (until it can be read, the last good policy of the network stays in force)", err))
			return config.Entry{Network: n.network, Policy: stored.Policy}, nil
		}
	}
	return config.Entry{}, withCode(types.ErrInvalidNetworkConfig, err)
}

// confDir returns the runtimes' configuration directory, which it reads when it is first called:
// most ADDs do not need it.
func (n *node) confDir() config.ConfDir {
	if n.confs == nil {
		confs, err := config.ReadConfDir(n.pluginFile.CNIConfDir)
		if !errors.Is(err, os.ErrNotExist) {
			n.Warn(err)
		}
		n.confs, n.confsErr = &confs, err
	}
	return *n.confs
}

// result returns the prevResult, and as the result of ADD that key for key, in the version of the
// configuration (CNI spec, section 4).
func (n *node) result() (types.Result, []byte, error) {
	const see = "see what the plugin before ip-masq in the conflist returns"
	prevResult := n.netconf.Value("prevResult")
	if len(prevResult) == 0 || string(prevResult) == "null" {
		return nil, nil, errors.New("prevResult: is missing; ip-masq runs after the plugin that makes the interface: " +
			"list it behind that one in the conflist's plugins")
	}
	var keys map[string]json.RawMessage
	var stated struct {
		CNIVersion string `json:"cniVersion"`
	}
	err := cmp.Or(json.Unmarshal(prevResult, &keys), json.Unmarshal(prevResult, &stated))
	version := cmp.Or(n.cniVersion, "0.1.0") // of a configuration without a version
	given := cmp.Or(stated.CNIVersion, version)
	var result types.Result
	switch {
	case err != nil:
	case stated.CNIVersion == "" && version != "0.1.0" && version != "0.2.0":
		err = errors.New("it has no cniVersion")
	default:
		result, err = create.Create(given, prevResult)
	}
	if wrong, is := errors.AsType[*json.UnmarshalTypeError](err); is {
		err = fmt.Errorf("%s has the JSON type %s", cmp.Or(wrong.Field, "it"), wrong.Value)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("prevResult: is not a result of cniVersion %s: %s; %s",
			policy.Printable(given), policy.Printable(err.Error()), see)
	}
	if given != version {
		converted, err := podinfo.Convert(result, version)
		if err != nil {
			return nil, nil, fmt.Errorf("prevResult: convert from cniVersion %s to %s: %w; %s", given, version, err, see)
		}
		var out bytes.Buffer
		err = converted.PrintTo(&out)
		return result, out.Bytes(), err
	}
	keys["cniVersion"], err = json.Marshal(version)
	if err != nil {
		return nil, nil, err
	}
	output, err := json.Marshal(keys) // not indented: a line of a deeply nested value would be as long as that is deep
	return result, output, err
}

// podSubnets returns the subnets of the pod's addresses. Addresses without a subnet and those with a mask shorter than any
// pod network's have none: users who are not administrators may choose the address (Multus).
func podSubnets(addresses []net.IPNet) []netip.Prefix {
	const shortest, shortestIPv6, most = 8, 32, 16
	var subnets []netip.Prefix
	for _, n := range addresses {
		a, least := podinfo.Address(n), shortest
		if a.Is6() {
			least = shortestIPv6
		}
		if ones, bits := n.Mask.Size(); bits == a.BitLen() && least <= ones && ones < bits && len(subnets) < most {
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

// validAttachments returns the attachments that GC keeps, and whether the configuration has that
// list: an absent list differs from one that is empty or null.
func (n *node) validAttachments() (keep []store.Attachment, listed bool, err error) {
	const key = "cni.dev/valid-attachments"
	list := n.netconf.Value(key)
	if err := n.netconf.Err(); err != nil || list == nil {
		return nil, false, err
	}
	var valid []types.GCAttachment
	if err := json.Unmarshal(list, &valid); err != nil {
		return nil, false, fmt.Errorf("%s: %w", key, err)
	}
	for _, a := range valid {
		keep = append(keep, store.Attachment{ContainerID: a.ContainerID, IfName: a.IfName})
	}
	return keep, true, nil
}
