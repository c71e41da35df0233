// SPDX-License-Identifier: Apache-2.0

// Package reconcile keeps the rules of a node as its sources ask for. A sync reads the conflists and
// agent files, stores their policies in the dataDir and enforces the rules, as the plugin's verbs
// do; the loop syncs when rules or files change, and at an interval. The reconciler's commands call
// it; health, metrics and the log are made from its Report. Its invariant: a sync that finds
// everything correct writes nothing, and what a sync cannot do leaves the last good policy in force.
package reconcile
