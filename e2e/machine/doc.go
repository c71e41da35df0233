// SPDX-License-Identifier: Apache-2.0

// Package machine makes a whole machine of a host of a topology: one on which
// container runtimes and kubelets run as on a node that they have to themselves.
//
// What it owns is this invariant: whatever a program of the machine writes below
// the directories that nodes keep their state in, mounts or starts is seen on that
// machine alone, and ends with it. Any number of machines fit into one sandbox.
//
// A machine has a network namespace (the host's), a mount namespace in which the
// directories of Own are empty and its own at first, a pid namespace whose end is
// the end of every program in it, and a cgroup in each
// hierarchy for containers to be put into. All else is the sandbox's: programs,
// /tmp, and also /sys, which shows cgroups but not the machine's network.
//
//	world := topology.New(t, topology.Options{})
//	node := machine.New(t, world.Node)
//	daemon, err := node.StartDaemon("containerd", nil, "/usr/bin/containerd")
//	err = node.WriteFile("/etc/cni/net.d/10-pods.conflist", text, 0o644)
//
// Only tests may import it.
package machine
