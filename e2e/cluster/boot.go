// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"path/filepath"
)

// PowerFail ends every program of the node at once and removes what does not survive a boot: /run,
// rules, connections, the pods' links and cgroups.
func (n *Node) PowerFail(ctx context.Context) error {
	if err := n.Reboot(func(link string) bool { return link == "eth0" }); err != nil {
		return err
	}
	// Cgroups of killed processes can be removed only a moment later. kubelet would spend seconds
	// on each remaining one.
	return Await(ctx, Patience, func() error {
		return n.Run(ctx, "sh", "-ec", `for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*; do
			if [ -d "$hierarchy$1" ]; then find "$hierarchy$1" -mindepth 1 -depth -type d -exec rmdir {} +; fi
		done`, "sh", n.Cgroup)
	})
}

// Boot starts the programs of a node: containerd, kubelet and kube-proxy.
func (n *Node) Boot(ctx context.Context) error {
	if err := n.Runtime.Start(ctx); err != nil {
		return err
	}
	return n.Start()
}

// RemoveProject removes the project's image with a tag from the node, so that its pods cannot
// start.
func (n *Node) RemoveProject(ctx context.Context, tag string) error {
	ctr := filepath.Join(n.cluster.options.Binaries.Containerd, "ctr")
	return n.Run(ctx, ctr, "--namespace", "k8s.io", "images", "rm", "--sync", "ghcr.io/ip-masq/ip-masq-cni:"+tag)
}
