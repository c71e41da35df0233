// SPDX-License-Identifier: Apache-2.0

// Command multus imitates thin Multus as a plugin, for tests: it calls its delegates through libcni,
// with caches at Multus's paths (k8snetworkplumbingwg/multus-cni@f4f5d2dd4368:pkg/multus/multus.go),
// without further networks of pods.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

const (
	cache  = "/var/lib/cni/multus"
	binDir = "/opt/cni/bin"
)

func main() {
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Check: unused, Del: del}, version.All, "multus")
}

func unused(*skel.CmdArgs) error { return nil } // containerd does not call CHECK

// conf is what the plugin reads from stdin. There is one delegate: the network of the pod's own interface.
type conf struct {
	CNIVersion    string            `json:"cniVersion"`
	Delegates     []json.RawMessage `json:"delegates"`
	RuntimeConfig map[string]any    `json:"runtimeConfig"`
}

// delegate is a network of a pod, as Multus caches it.
type delegate struct {
	ConfList json.RawMessage
	Bytes    []byte
}

// network returns a delegate with the arguments for libcni.
func (c conf) network(text []byte, args *skel.CmdArgs) (*libcni.NetworkConfigList, *libcni.RuntimeConf, error) {
	list, err := libcni.NetworkConfFromBytes(text)
	if err != nil {
		return nil, nil, fmt.Errorf("delegate: %w", err)
	}
	r := &libcni.RuntimeConf{ContainerID: args.ContainerID, NetNS: args.Netns, IfName: args.IfName, CapabilityArgs: c.RuntimeConfig}
	for pair := range strings.SplitSeq(args.Args, ";") {
		key, value, _ := strings.Cut(pair, "=")
		r.Args = append(r.Args, [2]string{key, value})
	}
	return list, r, nil
}

func read(args *skel.CmdArgs) (c conf, err error) {
	if err = json.Unmarshal(args.StdinData, &c); err == nil && len(c.Delegates) != 1 {
		err = fmt.Errorf("%d delegates, want 1", len(c.Delegates))
	}
	return c, err
}

func plugins() *libcni.CNIConfig {
	dirs := append([]string{binDir}, filepath.SplitList(os.Getenv("CNI_PATH"))...)
	return libcni.NewCNIConfigWithCacheDir(dirs, cache, nil)
}

// add writes the delegate to the cache, from which DEL takes it.
func add(args *skel.CmdArgs) error {
	c, err := read(args)
	if err != nil {
		return err
	}
	list, runtime, err := c.network(c.Delegates[0], args)
	if err != nil {
		return err
	}
	text, err := json.Marshal([]delegate{{c.Delegates[0], c.Delegates[0]}})
	if err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(cache, 0o700), os.WriteFile(filepath.Join(cache, args.ContainerID), text, 0o600)); err != nil {
		return err
	}
	result, err := plugins().AddNetworkList(context.Background(), list, runtime)
	if err != nil {
		_ = plugins().DelNetworkList(context.Background(), list, runtime) // as Multus, which returns the first error
		return fmt.Errorf("error adding container to network %q: %w", list.Name, err)
	}
	return types.PrintResult(result, c.CNIVersion)
}

// del uses the delegate of the ADD; without a cache, as in a second DEL, that of its own input.
func del(args *skel.CmdArgs) error {
	c, err := read(args)
	if err != nil {
		return err
	}
	path, network := filepath.Join(cache, args.ContainerID), []byte(c.Delegates[0])
	if text, err := os.ReadFile(path); err == nil {
		defer func() { _ = os.Remove(path) }() // after an error too
		var cached [1]delegate
		if err := json.Unmarshal(text, &cached); err != nil {
			return err
		}
		network = cached[0].Bytes
	}
	list, runtime, err := c.network(network, args)
	if err != nil {
		return err
	}
	return plugins().DelNetworkList(context.Background(), list, runtime)
}
