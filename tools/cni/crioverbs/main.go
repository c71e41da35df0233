// SPDX-License-Identifier: Apache-2.0

// Command crioverbs calls network plugins through libcni in CRI-O's order, for hosts on which CRI-O
// does not run. CRI-O also uses libcni, so the plugins get the same input.
//
//	crioverbs start CONFLIST [ID...]     STATUS, then GC with the remaining pods as valid
//	crioverbs run CONFLIST ID NETNS      ADD, then CHECK; prints the result
//	crioverbs stop CONFLIST ID NETNS     DEL, with the conflist of the ADD, from libcni's cache
//
// CNI_PATH has the directories of plugins. The first failed call ends the command with exit code 1
// and the error. Without a cache, stop uses the current conflist, as CRI-O does.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

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
	usage := errors.New("usage: crioverbs start CONFLIST [ID...] | run CONFLIST ID NETNS | stop CONFLIST ID NETNS")
	if len(args) < 2 {
		return usage
	}
	verb, file, args := args[0], args[1], args[2:]
	list, err := libcni.ConfListFromFile(file)
	if err != nil {
		return err
	}
	plugins := libcni.NewCNIConfig(filepath.SplitList(os.Getenv("CNI_PATH")), nil)
	if verb == "start" {
		return start(ctx, plugins, list, args)
	}
	if len(args) != 2 {
		return usage
	}
	pod := &libcni.RuntimeConf{
		ContainerID: args[0], NetNS: args[1], IfName: ifName,
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "default"}, {"K8S_POD_NAME", args[0]}},
	}
	switch verb {
	case "run":
		result, err := plugins.AddNetworkList(ctx, list, pod)
		if err != nil {
			return fmt.Errorf("ADD: %w", err)
		}
		if err := plugins.CheckNetworkList(ctx, list, pod); err != nil {
			return fmt.Errorf("CHECK: %w", err)
		}
		return result.Print()
	case "stop":
		return stop(ctx, plugins, list, pod)
	}
	return usage
}

func start(ctx context.Context, plugins *libcni.CNIConfig, list *libcni.NetworkConfigList, valid []string) error {
	if err := plugins.GetStatusNetworkList(ctx, list); err != nil {
		return fmt.Errorf("STATUS: %w", err)
	}
	attachments := make([]types.GCAttachment, 0, len(valid))
	for _, id := range valid {
		attachments = append(attachments, types.GCAttachment{ContainerID: id, IfName: ifName})
	}
	if err := plugins.GCNetworkList(ctx, list, &libcni.GCArgs{ValidAttachments: attachments}); err != nil {
		return fmt.Errorf("GC: %w", err)
	}
	return nil
}

func stop(ctx context.Context, plugins *libcni.CNIConfig, list *libcni.NetworkConfigList, pod *libcni.RuntimeConf) error {
	text, cached, err := plugins.GetNetworkListCachedConfig(list, pod)
	if err != nil {
		return err
	}
	if text != nil {
		if list, err = libcni.ConfListFromBytes(text); err != nil {
			return fmt.Errorf("cached conflist: %w", err)
		}
		pod = cached
	}
	if err := plugins.DelNetworkList(ctx, list, pod); err != nil {
		return fmt.Errorf("DEL: %w", err)
	}
	return nil
}
