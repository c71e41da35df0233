// SPDX-License-Identifier: Apache-2.0

// Package simulation runs the plugin's verbs and the reconciler's syncs on a simulated node, in orders and with failures
// that no test would think of, and judges the packets of each pod after every effect. A seed decides everything.
//
// # Run
//
//	go test ./e2e/simulation -run Simulation -v                   # new seeds for a while; the first one is printed
//	go test ./e2e/simulation -run Simulation -v -duration 1h      # for longer
//	go test ./e2e/simulation -run Simulation -v -seed 4711        # this one again
//	… -seed 4711 -effects                                         # with every effect, shrunk or not
//
// # Read a failure
//
// A failure has four parts. First, what the seed decided: the host, the chains with the keys on which their networks agree, and
// the versions of each network's plugin entry (net0/1 is the second one of net0). Second, the operations, already shrunk to
// those that are necessary: "add pod3 &" starts and the next operation begins at once, "[kill at 40]" ends the process
// before its 40th effect, "[fail at 40]" makes the first write from there on fail. Third, the trace: one line for each
// effect, with its number, the process that had it, and what it was (a call on files, or one at a port of the packet
// filter); what a verb wrote to stderr, and a sync's problems, follow its last line. Fourth, the objection. The last effect
// before OBJECTION is the one that made the packet wrong; read the trace backwards from there. The objection about a packet
// lists the combinations of versions that may be in force, one of which each packet has to follow.
//
// # How it works
//
// TestSimulation builds itself again with an overlay (go help build) in which the product's calls of packages os and unix
// are those of package system: files in memory, of which a crash keeps what was synced and some of the rest. The packet
// filter is kernel, at the ports netfilter.Driver, Backend and GuardTables. Each process is a goroutine of one
// testing/synctest bubble, and one of them runs at a time, from effect to effect (world). What the scenario states is in
// scenario_test.go, what processes and disturbances do in ops_test.go. The oracle (oracle_test.go) knows only what the
// scenario has stated: the versions that may be in force because of an operation are its claims, and decide is section 3.1 of the
// contract written once more. Where it must be tolerant, a comment beside the condition gives the reason.
//
// A function of packages os or unix that the product uses for the first time stops the build with its name: add it to
// package system.
package simulation
