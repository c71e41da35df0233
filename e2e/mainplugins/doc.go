// SPDX-License-Identifier: Apache-2.0

// Package mainplugins writes the conflists of main CNI plugins as their own programs do, for tests:
// the same files, keys and system calls, at the same times. Writers is the table of these programs,
// with the source that each row was read from; Multus, which generates its file from the others', is
// a type of its own. Cilium's writer is its own program (tools/cilium).
//
// The tests of this package have the build tag e2e_cluster. They run the writers beside a real
// reconciler under a real containerd, with pods whose packets are read by their receiver, but
// without a cluster. `make e2e-cluster` runs them, in about two minutes on two cores.
package mainplugins
