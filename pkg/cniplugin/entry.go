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
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
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

func (n *node) conflists() enforce.Conflists { return n.confDir() }

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
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		err = fmt.Errorf("%s has the JSON type %s", cmp.Or(wrong.Field, "it"), wrong.Value)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("prevResult: is not a result of cniVersion %s: %s; %s",
			policy.Printable(given), policy.Printable(err.Error()), see)
	}
	if given != version {
		converted, err := convert(result, version)
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

// convert converts a result. The CNI library panics if an item of a list is null.
func convert(result types.Result, version string) (converted types.Result, err error) {
	defer func() {
		if recover() != nil {
			err = errors.New("an item of interfaces, ips or routes is null")
		}
	}()
	return result.GetAsVersion(version)
}

// podSubnets returns the subnets of the pod's addresses. Addresses without a subnet and those with a mask shorter than any
// pod network's have none: users who are not administrators may choose the address (Multus).
func podSubnets(addresses []net.IPNet) []netip.Prefix {
	const shortest, shortestIPv6, most = 8, 32, 16
	var subnets []netip.Prefix
	for _, n := range addresses {
		a, least := addressOf(n), shortest
		if a.Is6() {
			least = shortestIPv6
		}
		if ones, bits := n.Mask.Size(); bits == a.BitLen() && least <= ones && ones < bits && len(subnets) < most {
			subnets = append(subnets, netip.PrefixFrom(a, ones).Masked())
		}
	}
	return subnets
}

func addressOf(n net.IPNet) netip.Addr {
	a, _ := netip.AddrFromSlice(n.IP)
	return a.Unmap()
}

// podAddresses returns the addresses that a result has for the pod's interface, without link-local ones.
func podAddresses(result types.Result, ifName string) (addresses []net.IPNet) {
	if result == nil {
		return nil
	}
	converted, err := convert(result, types100.ImplementedSpecVersion)
	if err != nil {
		return nil
	}
	r := converted.(*types100.Result)
	isPod := func(i int) bool {
		return 0 <= i && i < len(r.Interfaces) && r.Interfaces[i] != nil && r.Interfaces[i].Name == ifName && r.Interfaces[i].Sandbox != ""
	}
	for _, ip := range r.IPs {
		if ip == nil || ip.Interface != nil && !isPod(*ip.Interface) {
			continue
		}
		if a := addressOf(ip.Address); a.IsValid() && !a.IsLinkLocalUnicast() {
			addresses = append(addresses, ip.Address)
		}
	}
	return addresses
}

// podOf returns the pod of an attachment: its names in CNI_ARGS, which the kubelet gives to the runtime, and its addresses.
// A name that Kubernetes does not allow, or that is repeated with another value, counts as absent; Multus repeats some.
func podOf(a store.Attachment, cniArgs string, addresses []net.IPNet) store.Pod {
	const most = 64
	isNamespace := func(s string) bool { _, err := policy.ParseNamespace(s); return err == nil }
	pod := store.Pod{Attachment: a}
	for _, n := range addresses[:min(most, len(addresses))] {
		if a := addressOf(n); !slices.Contains(pod.Addresses, a) {
			pod.Addresses = append(pod.Addresses, a)
		}
	}
	for key, name := range map[string]struct {
		to      *string
		isValid func(string) bool
	}{"K8S_POD_NAMESPACE": {&pod.Namespace, isNamespace}, "K8S_POD_NAME": {&pod.Name, policy.IsPodName}} {
		var values []string
		for pair := range strings.SplitSeq(cniArgs, ";") {
			if k, value, _ := strings.Cut(pair, "="); k == key && !slices.Contains(values, value) {
				values = append(values, value)
			}
		}
		if len(values) == 1 && name.isValid(values[0]) {
			*name.to = values[0]
		}
	}
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
