// SPDX-License-Identifier: Apache-2.0

// Command flannel imitates flannel's CNI plugin, github.com/flannel-io/cni-plugin, which the module
// proxy does not serve. It lets bridge and host-local attach the pod to the subnet that flanneld has
// written to subnet.env. If flanneld does not masquerade, bridge does, unless the delegate says
// otherwise. As the original it does nothing on CHECK and has neither STATUS nor GC.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/version"
)

func main() {
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Del: del, Check: check}, version.All, "imitation of CNI Plugin flannel")
}

// netConf is the plugin's configuration.
type netConf struct {
	CNIVersion    string         `json:"cniVersion"`
	Name          string         `json:"name"`
	IPAM          map[string]any `json:"ipam"`
	SubnetFile    string         `json:"subnetFile"`
	DataDir       string         `json:"dataDir"`
	Delegate      map[string]any `json:"delegate"`
	RuntimeConfig map[string]any `json:"runtimeConfig"`
}

func load(text []byte) (netConf, error) {
	n := netConf{SubnetFile: "/run/flannel/subnet.env", DataDir: "/var/lib/cni/flannel"}
	if err := json.Unmarshal(text, &n); err != nil {
		return n, fmt.Errorf("failed to load netconf: %w", err)
	}
	return n, nil
}

func add(args *skel.CmdArgs) error {
	n, err := load(args.StdinData)
	if err != nil {
		return fmt.Errorf("loadFlannelNetConf failed: %w", err)
	}
	env, err := readSubnetEnv(n.SubnetFile)
	if err != nil {
		return fmt.Errorf("loadFlannelSubnetEnv failed: %w", err)
	}
	plugin, delegate, err := n.delegate(env)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(n.DataDir, 0o700); err != nil {
		return err
	}
	if err := write(filepath.Join(n.DataDir, args.ContainerID), delegate); err != nil {
		return err
	}
	result, err := invoke.DelegateAdd(context.Background(), plugin, delegate, nil)
	if err != nil {
		return fmt.Errorf("failed to delegate add: %w", err)
	}
	return result.Print()
}

// del gives the delegate the configuration that ADD saved. Without one it succeeds.
func del(args *skel.CmdArgs) error {
	n, err := load(args.StdinData)
	if err != nil {
		return err
	}
	saved := filepath.Join(n.DataDir, args.ContainerID)
	delegate, err := os.ReadFile(saved)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var plugin struct{ Type string }
	if err := json.Unmarshal(delegate, &plugin); err != nil {
		fmt.Fprintf(os.Stderr, "failed to parse netconf: %v", err)
		return nil
	}
	if err := invoke.DelegateDel(context.Background(), plugin.Type, delegate, nil); err != nil {
		return err
	}
	_ = os.Remove(saved)
	return nil
}

func check(*skel.CmdArgs) error { return nil }

// delegate returns the delegate's type and configuration.
func (n netConf) delegate(env subnetEnv) (plugin string, text []byte, err error) {
	d := n.Delegate
	if d == nil {
		d = map[string]any{}
	}
	for _, key := range []string{"name", "ipam"} {
		if _, ok := d[key]; ok {
			return "", nil, fmt.Errorf("'delegate' dictionary must not have '%s' field, it'll be set by flannel", key)
		}
	}
	setDefault(d, "type", "bridge")
	plugin, ok := d["type"].(string)
	if !ok {
		return "", nil, errors.New("'delegate' dictionary, if present, must have (string) 'type' field")
	}
	if n.RuntimeConfig != nil {
		d["runtimeConfig"] = n.RuntimeConfig
	}
	d["name"] = n.Name
	setDefault(d, "ipMasq", !*env.ipMasq)
	setDefault(d, "mtu", *env.mtu)
	if plugin == "bridge" {
		setDefault(d, "isGateway", true)
	}
	if n.CNIVersion != "" {
		d["cniVersion"] = n.CNIVersion
	}
	d["ipam"] = n.ipam(env)
	text, err = json.Marshal(d)
	return plugin, text, err
}

// ipam returns the configuration of IPAM: a range for each subnet and a route to each network.
func (n netConf) ipam(env subnetEnv) map[string]any {
	ipam := n.IPAM
	if ipam == nil {
		ipam = map[string]any{}
	}
	setDefault(ipam, "type", "host-local")
	var ranges [][]map[string]any
	for _, subnet := range env.subnets {
		ranges = append(ranges, []map[string]any{{"subnet": subnet}})
	}
	ipam["ranges"] = ranges
	routes, _ := ipam["routes"].([]any)
	for _, network := range env.networks {
		routes = append(routes, map[string]any{"dst": network})
	}
	ipam["routes"] = routes
	return ipam
}

func setDefault(m map[string]any, key string, value any) {
	if _, ok := m[key]; !ok {
		m[key] = value
	}
}

// subnetEnv is the content of subnet.env, IPv4 first.
type subnetEnv struct {
	networks, subnets []netip.Prefix
	mtu               *uint64
	ipMasq            *bool
}

func readSubnetEnv(path string) (env subnetEnv, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return env, err
	}
	values := map[string]string{}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(strings.TrimRight(line, "\n"), "=")
		values[key] = value
	}
	for _, family := range []string{"FLANNEL_", "FLANNEL_IPV6_"} {
		if env.networks, err = appendPrefixes(env.networks, values[family+"NETWORK"]); err != nil {
			return env, err
		}
		if env.subnets, err = appendPrefixes(env.subnets, values[family+"SUBNET"]); err != nil {
			return env, err
		}
	}
	if text, ok := values["FLANNEL_MTU"]; ok {
		mtu, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return env, err
		}
		env.mtu = &mtu
	}
	if text, ok := values["FLANNEL_IPMASQ"]; ok {
		on := text == "true"
		env.ipMasq = &on
	}
	return env, env.missing(path)
}

// missing returns an error that names the keys that subnet.env lacks.
func (env subnetEnv) missing(path string) error {
	var keys []string
	if len(env.networks) == 0 {
		keys = append(keys, "FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK")
	}
	if len(env.subnets) == 0 {
		keys = append(keys, "FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET")
	}
	if env.mtu == nil {
		keys = append(keys, "FLANNEL_MTU")
	}
	if env.ipMasq == nil {
		keys = append(keys, "FLANNEL_IPMASQ")
	}
	if len(keys) == 0 {
		return nil
	}
	return fmt.Errorf("%s is missing %s", path, strings.Join(keys, ", "))
}

// appendPrefixes appends the prefixes of a value with commas, without host bits, each once.
func appendPrefixes(to []netip.Prefix, value string) ([]netip.Prefix, error) {
	if value == "" {
		return to, nil
	}
	for text := range strings.SplitSeq(value, ",") {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, err
		}
		if p = p.Masked(); !slices.Contains(to, p) {
			to = append(to, p)
		}
	}
	return to, nil
}

// write writes a file and syncs it.
func write(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Sync(), f.Close())
}
