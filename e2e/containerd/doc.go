// SPDX-License-Identifier: Apache-2.0

// Package containerd runs a containerd on a machine (e2e/machine) as nodes run it,
// with its CRI service and the runtime's usual paths: /etc/cni/net.d, /opt/cni/bin,
// /run/containerd, /var/lib/containerd. Pods are asked of it with crictl.
//
// What it owns is this invariant: the network plugins are called by the real
// containerd, with nothing between. It fetches nothing: the images that pods are
// made of come from Images. What containerd starts ends with the machine.
//
//	node := machine.New(t, world.Node)
//	runtime := containerd.New(t, node, containerd.Options{Programs: dir})
//	pod, err := runtime.RunPod(ctx, "web")
//	host, err := world.Adopt("web", pod.Netns) // and then host.SendTCP
//
// The directory pod has the program of the image PodImage. Only tests may import
// the package.
package containerd
