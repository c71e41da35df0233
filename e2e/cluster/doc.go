// SPDX-License-Identifier: Apache-2.0

// Package cluster runs a Kubernetes cluster inside a sandbox for tests with the build tag
// e2e_cluster: a control plane and nodes, each a machine on a veth pair to a router, with a LAN and
// an outside host. The programs are unmodified Kubernetes, etcd and containerd; a source address
// was read from a packet by its receiver; and no process outlives the test, because each machine
// has a PID namespace. Unlike in a real cluster a reboot is simulated by removing what does not
// survive it, and there is no DNS before StartDNS.
// Initially the cluster has only a control plane, containerd, kubelet, kube-proxy and bridge as the
// main CNI plugin, which one test replaces by flannel; tests install the project. They need root;
// `make e2e-cluster` runs them, and `make e2e-kubernetes` runs the network tests of Kubernetes.
//
//	control ─┐          ┌─ lan: has routes to the pods
//	node1 ───┼─ router ─┤
//	node2 ───┘          └─ outside: the rest of the world
package cluster
