// SPDX-License-Identifier: Apache-2.0

// Package e2e tests the built programs on nodes made of network namespaces. cnitool runs the
// plugin after the reference plugins, the reconciler runs at the same time, and remote hosts
// observe the packets. Most tests run on each backend: nftables, iptables-nft and iptables-legacy.
// The package has only tests, and no other package imports it. `make test` builds the programs
// that it runs.
package e2e
