// SPDX-License-Identifier: Apache-2.0

// Package metrics tells the outside how the node is: metrics in the form of
// Prometheus, and whether the process is alive and the node ready. It is told of
// each pass and each look at the conflist, and asks for a reading of the rules when
// somebody scrapes.
//
// Its invariants: a counter never falls while the process lives, whatever
// becomes of the rules whose connections it counts. What it keeps and what it
// exports is bounded, whatever configuration names. Health never waits: neither
// for a scrape nor for the kernel. And nothing here writes anything or makes a
// pass.
//
// The package knows the reports of reconcile and the readings of enforce. Only
// the reconciler's main may import it.
package metrics
