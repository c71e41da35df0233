// SPDX-License-Identifier: Apache-2.0

// Command crioverbs calls network plugins as CRI-O does, for hosts on which CRI-O does not run. It
// follows CRI-O (cri-o/cri-o@46dd9122698b:internal/config/cnimgr/cnimgr.go) and its library, which also uses
// libcni (cri-o/ocicni@88cd89b58282:pkg/ocicni/ocicni.go).
//
//	crioverbs load DIR             prints the name of the default network
//	crioverbs start DIR [ID...]    STATUS; GC of every network with these pods as valid; CHECK of each
//	crioverbs run DIR ID NETNS     ADD, then CHECK; prints the result. After a failure: DEL
//	crioverbs stop DIR ID NETNS    DEL
//
// Each command loads the configuration directory first and calls VERSION of each plugin: a list is
// skipped if one of its plugins is missing or does not support the list's version. The first list
// is the default network. CHECK and DEL use the conflist of the ADD, from libcni's cache, and the
// loaded one without a cache. CRI-O loads at its start and when the directory or CNI_PATH, the
// directories of plugins, change.
//
// The first failed call ends the command with exit code 1 and the error. CRI-O only logs failures
// of start: it calls GC once STATUS succeeds, and has no addresses of a pod whose CHECK fails.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
)

const ifName = "eth0"

func main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "crioverbs:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	usage := errors.New("usage: crioverbs load DIR | start DIR [ID...] | run DIR ID NETNS | stop DIR ID NETNS")
	if len(args) < 2 {
		return usage
	}
	verb, dir, args := args[0], args[1], args[2:]
	r, err := load(ctx, dir)
	if err != nil {
		return err
	}
	switch {
	case verb == "load" && len(args) == 0:
		_, err := fmt.Println(r.defaultNetwork)
		return err
	case verb == "start":
		return r.start(ctx, args)
	case verb == "run" && len(args) == 2:
		err := r.run(ctx, args[0], args[1])
		if err != nil {
			err = errors.Join(err, r.stop(ctx, args[0], args[1]))
		}
		return err
	case verb == "stop" && len(args) == 2:
		return r.stop(ctx, args[0], args[1])
	}
	return usage
}

// runtime is CRI-O after it has loaded a configuration directory.
type runtime struct {
	plugins        *libcni.CNIConfig
	networks       map[string]*libcni.NetworkConfigList
	defaultNetwork string
}

// load is ocicni's loadNetworks.
func load(ctx context.Context, dir string) (*runtime, error) {
	r := &runtime{
		plugins:  libcni.NewCNIConfig(filepath.SplitList(os.Getenv("CNI_PATH")), nil),
		networks: map[string]*libcni.NetworkConfigList{},
	}
	files, err := libcni.ConfFiles(dir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return nil, err
	}
	slices.Sort(files)
	for _, file := range files {
		list, err := read(file)
		if err == nil && len(list.Plugins) == 0 {
			err = errors.New("no plugins")
		}
		if err == nil {
			_, err = r.plugins.ValidateNetworkList(ctx, list)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "crioverbs: skipped %s: %v\n", file, err)
			continue
		}
		list.Name = cmp.Or(list.Name, filepath.Base(file))
		if r.networks[list.Name] == nil {
			r.networks[list.Name] = list
		}
		r.defaultNetwork = cmp.Or(r.defaultNetwork, list.Name)
	}
	return r, nil
}

func read(file string) (*libcni.NetworkConfigList, error) {
	if filepath.Ext(file) == ".conflist" {
		return libcni.ConfListFromFile(file)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	single, err := libcni.NetworkPluginConfFromBytes(text)
	if err != nil {
		return nil, err
	}
	return libcni.ConfListFromConf(single) //nolint:staticcheck // as CRI-O does
}

func (r *runtime) network(name string) (*libcni.NetworkConfigList, error) {
	if name == "" {
		return nil, errors.New("no CNI configuration file. Has your network provider started?")
	}
	if list := r.networks[name]; list != nil {
		return list, nil
	}
	return nil, fmt.Errorf("failed to find requested network name %s", name)
}

func (r *runtime) status(ctx context.Context) error {
	list, err := r.network(r.defaultNetwork)
	if err != nil {
		return err
	}
	if err := r.plugins.GetStatusNetworkList(ctx, list); err != nil {
		return fmt.Errorf("STATUS: %w", err)
	}
	return nil
}

func (r *runtime) start(ctx context.Context, pods []string) error {
	if err := r.status(ctx); err != nil {
		return err
	}
	valid := make([]types.GCAttachment, 0, len(pods))
	for _, id := range pods {
		valid = append(valid, types.GCAttachment{ContainerID: id, IfName: ifName})
	}
	for name, list := range r.networks {
		args := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{}}
		if name == r.defaultNetwork { // CRI-O counts a pod as one of this network, whenever it was made
			args.ValidAttachments = valid
		}
		if err := r.plugins.GCNetworkList(ctx, list, args); err != nil {
			return fmt.Errorf("GC: %w", err)
		}
	}
	for _, id := range pods {
		attachments, err := r.plugins.GetCachedAttachments(id)
		if err != nil {
			return err
		}
		for _, a := range attachments {
			if _, err := r.check(ctx, id, a.NetNS); err != nil {
				return fmt.Errorf("pod %s: %w", id, err)
			}
		}
	}
	return nil
}

// runtimeConf is ocicni's buildCNIRuntimeConf.
func runtimeConf(id, netns, ifName string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: id, NetNS: netns, IfName: ifName,
		Args: [][2]string{
			{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "default"}, {"K8S_POD_NAME", id},
			{"K8S_POD_INFRA_CONTAINER_ID", id}, {"K8S_POD_UID", "uid-" + id},
		},
		CapabilityArgs: map[string]any{"cgroupPath": "", "io.kubernetes.cri.pod-annotations": map[string]string{}},
	}
}

// cached returns a network as it was at the pod's ADD, or as it was loaded.
func (r *runtime) cached(name string, pod *libcni.RuntimeConf) (*libcni.NetworkConfigList, *libcni.RuntimeConf, error) {
	text, then, err := r.plugins.GetNetworkListCachedConfig(&libcni.NetworkConfigList{Name: name}, pod)
	if err == nil && text != nil {
		if list, err := libcni.NetworkConfFromBytes(text); err == nil {
			return list, then, nil
		}
	}
	list, err := r.network(name)
	return list, pod, err
}

func (r *runtime) run(ctx context.Context, id, netns string) error {
	list, err := r.network(r.defaultNetwork)
	if err != nil {
		return err
	}
	if _, err := r.plugins.AddNetworkList(ctx, list, runtimeConf(id, netns, ifName)); err != nil {
		return fmt.Errorf("ADD: %w", err)
	}
	result, err := r.check(ctx, id, netns)
	if err != nil {
		return err
	}
	return result.Print()
}

// check is ocicni's GetPodNetworkStatus. It returns the result of the ADD.
func (r *runtime) check(ctx context.Context, id, netns string) (types.Result, error) {
	list, pod, err := r.cached(r.defaultNetwork, runtimeConf(id, netns, ifName))
	if err != nil {
		return nil, err
	}
	if err := r.plugins.CheckNetworkList(ctx, list, pod); err != nil {
		return nil, fmt.Errorf("CHECK: %w", err)
	}
	result, err := r.plugins.GetNetworkListCachedResult(list, pod)
	if err == nil && result == nil {
		err = errors.New("no cached result")
	}
	return result, err
}

// stop is ocicni's TearDownPod.
func (r *runtime) stop(ctx context.Context, id, netns string) error {
	attachments, err := r.plugins.GetCachedAttachments(id)
	if err != nil || len(attachments) == 0 {
		attachments = []*libcni.NetworkAttachment{{Network: r.defaultNetwork, IfName: ifName}}
	}
	for _, a := range attachments {
		list, pod, err := r.cached(a.Network, runtimeConf(id, netns, a.IfName))
		if err != nil {
			return err
		}
		if err := r.plugins.DelNetworkList(ctx, list, pod); err != nil {
			return fmt.Errorf("DEL: %w", err)
		}
	}
	return nil
}
