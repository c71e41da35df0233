// SPDX-License-Identifier: Apache-2.0

// Package reconcile keeps a node as its sources have it. A pass reads conflists
// and agent files, puts what they state into the documents of the dataDir, and
// makes sure of the rules as the plugin's verbs do; a loop makes passes when
// rules or files change, and from time to time without a reason.
//
// A pass that finds all as it should be only reads. What a pass could not do, or
// what somebody has to look at, is in its Report, which is what health, metrics
// and the log are made of: the node's last good policy stays in force meanwhile.
//
// The package knows configuration, store and enforce. It knows no backend, no
// metrics library and no command line.
package reconcile
