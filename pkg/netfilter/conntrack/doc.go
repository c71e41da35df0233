// SPDX-License-Identifier: Apache-2.0

// Package conntrack deletes stale conntrack entries of the node, finds connections by what their peers
// see, and reads conntrack statistics. The plugin and the reconciler call it for staleConnections. Its invariant: it deletes only what a
// policy.ConnectionJudge calls stale, and nothing if the node's own addresses are not known. It
// streams ctnetlink messages and asks for routes through nfnetlink, because
// github.com/vishvananda/netlink holds the whole table in memory (100 MB for 250,000 entries) and its
// import makes each plugin process slower.
package conntrack
