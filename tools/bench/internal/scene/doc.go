// SPDX-License-Identifier: Apache-2.0

// Package scene is what is measured on: nodes in network namespaces of their
// own, the prefixes of their policies, rules of others, plugins that run there
// and connections that are opened through them. What it owns is that all
// contenders meet the same node, the same entry on stdin and the same result of
// the plugin before.
package scene
