// SPDX-License-Identifier: Apache-2.0

// Package conntrack deletes stale conntrack entries of the node, finds connections by what their
// peers see, and reads conntrack statistics. The plugin and the reconciler call it for
// staleConnections. Its invariant: it deletes only what a policy.ConnectionJudge calls stale, and
// nothing if the node's own addresses are not known.
package conntrack
