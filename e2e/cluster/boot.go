// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"path/filepath"
)

// PowerFail ends every program of the node at once and takes away what does not
// survive a boot: /run, rules, connections, pods' links and control groups.
func (n *Node) PowerFail(ctx context.Context) error {
	if err := n.Reboot(func(link string) bool { return link == "eth0" }); err != nil {
		return err
	}
	// Killed processes leave theirs a moment later. kubelet would look into each of
	// those that stay, for seconds.
	return Await(ctx, Patience, func() error {
		return n.Run(ctx, "sh", "-ec", `for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*; do
			if [ -d "$hierarchy$1" ]; then find "$hierarchy$1" -mindepth 1 -depth -type d -exec rmdir {} +; fi
		done`, "sh", n.Cgroup)
	})
}

// Boot starts what a node starts: containerd, kubelet and kube-proxy.
func (n *Node) Boot(ctx context.Context) error {
	if err := n.Runtime.Start(ctx); err != nil {
		return err
	}
	return n.Start()
}

// RemoveProject takes the project's image of a tag from the node, so that its pods
// cannot start there.
func (n *Node) RemoveProject(ctx context.Context, tag string) error {
	ctr := filepath.Join(n.cluster.options.Binaries.Containerd, "ctr")
	return n.Run(ctx, ctr, "--namespace", "k8s.io", "images", "rm", "--sync", "ghcr.io/ip-masq/ip-masq-cni:"+tag)
}
