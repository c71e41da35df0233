// SPDX-License-Identifier: Apache-2.0

// Command multus imitates thin Multus as a plugin, for tests: it calls its delegates through libcni,
// with caches at Multus's paths (k8snetworkplumbingwg/multus-cni@f4f5d2dd4368:pkg/multus/multus.go). A
// directory replaces the cluster: pods/NAME has a line for each network of that pod's annotation
// k8s.v1.cni.cncf.io/networks, and networks/NAME the config of a NetworkAttachmentDefinition.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

const (
	cluster = "/etc/cni/multus/cluster"
	cache   = "/var/lib/cni/multus"
	binDir  = "/opt/cni/bin"
)

func main() {
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Check: unused, Del: del}, version.All, "multus")
}

func unused(*skel.CmdArgs) error { return nil } // containerd does not call CHECK

// conf is what the plugin reads from stdin.
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

// attachment is a delegate with the arguments for libcni.
type attachment struct {
	list    *libcni.NetworkConfigList
	runtime *libcni.RuntimeConf
}

// attachments returns the calls for the delegates: the first has the pod's own interface.
func (c conf) attachments(args *skel.CmdArgs) ([]attachment, error) {
	var all []attachment
	for i, text := range c.Delegates {
		list, err := libcni.NetworkConfFromBytes(text)
		if err != nil {
			return nil, fmt.Errorf("delegate %d: %w", i, err)
		}
		a := attachment{list, &libcni.RuntimeConf{ContainerID: args.ContainerID, NetNS: args.Netns, IfName: args.IfName, Args: pairs(args)}}
		if i == 0 {
			a.runtime.CapabilityArgs = c.RuntimeConfig
		} else {
			a.runtime.IfName = fmt.Sprint("net", i)
		}
		all = append(all, a)
	}
	return all, nil
}

// pairs returns the arguments of a kubelet's runtime.
func pairs(args *skel.CmdArgs) (all [][2]string) {
	for pair := range strings.SplitSeq(args.Args, ";") {
		key, value, _ := strings.Cut(pair, "=")
		all = append(all, [2]string{key, value})
	}
	return all
}

func plugins() *libcni.CNIConfig {
	dirs := append([]string{binDir}, filepath.SplitList(os.Getenv("CNI_PATH"))...)
	return libcni.NewCNIConfigWithCacheDir(dirs, cache, nil)
}

// networks returns the networks of a pod's annotation.
func networks(args *skel.CmdArgs) ([]json.RawMessage, error) {
	var pod string
	for _, pair := range pairs(args) {
		if pair[0] == "K8S_POD_NAME" {
			pod = pair[1]
		}
	}
	text, err := os.ReadFile(filepath.Join(cluster, "pods", pod))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var all []json.RawMessage
	for _, name := range strings.Fields(string(text)) {
		config, err := os.ReadFile(filepath.Join(cluster, "networks", name))
		if err != nil {
			return nil, err
		}
		all = append(all, config)
	}
	return all, nil
}

func add(args *skel.CmdArgs) error {
	var c conf
	if err := json.Unmarshal(args.StdinData, &c); err != nil {
		return err
	}
	further, err := networks(args)
	if err != nil {
		return err
	}
	c.Delegates = append(c.Delegates, further...)
	all, err := c.attachments(args)
	if err != nil {
		return err
	}
	if err := c.save(args.ContainerID); err != nil {
		return err
	}
	var result types.Result
	for i, a := range all {
		r, err := plugins().AddNetworkList(context.Background(), a.list, a.runtime)
		if err != nil {
			_ = remove(all[:i+1]) // as Multus, which returns the first error
			return fmt.Errorf("error adding container to network %q: %w", a.list.Name, err)
		}
		if i == 0 {
			result = r
		}
	}
	return types.PrintResult(result, c.CNIVersion)
}

// save writes the delegates to the cache, from which DEL takes them.
func (c conf) save(id string) error {
	var all []delegate
	for _, text := range c.Delegates {
		all = append(all, delegate{text, text})
	}
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(cache, 0o700), os.WriteFile(filepath.Join(cache, id), text, 0o600))
}

// del uses the delegates of the ADD; without a cache, as in a second DEL, those of its own input.
func del(args *skel.CmdArgs) error {
	var c conf
	if err := json.Unmarshal(args.StdinData, &c); err != nil {
		return err
	}
	path := filepath.Join(cache, args.ContainerID)
	if text, err := os.ReadFile(path); err == nil {
		defer func() { _ = os.Remove(path) }() // after an error too
		var cached []delegate
		if err := json.Unmarshal(text, &cached); err != nil {
			return err
		}
		c.Delegates = nil
		for _, d := range cached {
			c.Delegates = append(c.Delegates, d.Bytes)
		}
	}
	all, err := c.attachments(args)
	if err != nil {
		return err
	}
	return remove(all)
}

// remove calls DEL in reverse order, and goes on after an error.
func remove(all []attachment) error {
	var errs []error
	for i := len(all) - 1; i >= 0; i-- {
		errs = append(errs, plugins().DelNetworkList(context.Background(), all[i].list, all[i].runtime))
	}
	return errors.Join(errs...)
}
