// SPDX-License-Identifier: Apache-2.0

// Package containerd runs a real containerd on a machine (e2e/machine), with its CRI service and
// usual paths (/etc/cni/net.d, /opt/cni/bin, /run/containerd, /var/lib/containerd), for tests that
// create pods with crictl. It downloads nothing: Image builds the image, with the program of the
// directory pod. Everything that containerd starts ends with the machine.
//
//	node := machine.New(t, world.Node)
//	runtime := containerd.New(t, node, containerd.Options{Programs: dir})
//	pod, err := runtime.RunPod(ctx, "web")
//	host, err := world.Adopt("web", pod.Netns) // and then host.SendTCP
package containerd
