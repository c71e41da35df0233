// SPDX-License-Identifier: Apache-2.0

// Package cluster runs a Kubernetes cluster inside a sandbox: a control plane
// and nodes, each a host of its own on a wire to a router, with a LAN and an
// outside beyond.
//
//	control ─┐          ┌─ lan: knows where pods are
//	node1 ───┼─ router ─┤
//	node2 ───┘          └─ outside: the rest of the world
//
// What it owns is this invariant: the programs are those of Kubernetes, etcd and
// containerd as they are, what a test is told was seen was read from a packet
// by who received it, and nothing that runs outlives the test's process, however
// that ends: each machine has a pid namespace that ends with it.
//
// Of what a real cluster has these differ: the containers of a node share its uts
// namespace and boot id with the machine that runs the tests, so that a boot is told
// by what it takes away alone, and nobody resolves names.
//
// Nothing but a control plane, containerd, kubelet and kube-proxy is there at
// first: what installs this project is the test's business.
//
// Tests need root and carry the build tag e2e_cluster; `make e2e-cluster` runs
// them. Only they may import the package.
package cluster
