// SPDX-License-Identifier: Apache-2.0

// Package scene provides the nodes of the benchmark: network namespaces with prefixes, third-party
// rules, plugins, and connections. All contenders get the same node, entry and prevResult.
package scene
