// SPDX-License-Identifier: Apache-2.0

// Package machine turns a host of a topology into a machine on which container runtimes and
// kubelets run as on a node, for tests. Whatever a program of the machine writes below the
// directories of Own, mounts or starts is visible on that machine only and ends with it; one
// sandbox can have several machines. A machine has the host's network namespace, its own mount,
// PID and UTS namespaces (its hostname is the host's name), and a cgroup in each hierarchy for
// containers. It shares the sandbox's other files, including /tmp and /sys.
//
//	world := topology.New(t, topology.Options{})
//	node := machine.New(t, world.Node)
//	daemon, err := node.StartDaemon("containerd", nil, "/usr/bin/containerd")
//	err = node.WriteFile("/etc/cni/net.d/10-pods.conflist", text, 0o644)
package machine
