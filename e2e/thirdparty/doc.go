// SPDX-License-Identifier: Apache-2.0

// Package thirdparty is what goes on beside ip-masq on a node: rules as kube-proxy
// writes them, and an ear for everybody's commits.
//
// What it owns is that a commit counts as heard when the kernel told of it, and
// with the name of the program that made it.
//
// Only tests and benchmarks may import it.
package thirdparty
