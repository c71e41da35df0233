// SPDX-License-Identifier: Apache-2.0

// Package simulation runs the plugin's verbs and the reconciler on a simulated node, in orders and with failures that no
// test would think of, and judges the packets of each pod after every effect. A seed decides everything.
//
// # Run
//
//	go test ./e2e/simulation -run Simulation -v                   # new seeds, 20 s; the first one is printed
//	go test ./e2e/simulation -run Simulation -v -duration 1h      # longer, in time of a processor
//	… -duration 1h -first 4711                                    # with this first seed
//	go test ./e2e/simulation -run Simulation -v -seed 4711        # this one again
//	… -seed 4711 -effects                                         # with every effect, shrunk or not
//	… -duration 1h -known 'is dropped|outlives'                   # goes on after objections that are known
//	… -program FILE                                               # builds the simulation, to run it often: it has the same flags
//
// # Read a failure
//
// A failure has four parts. First, what the seed decided: the host, and the versions of each source (net0/1 is the second
// policy of net0, agent/0 the first one of the agent files) with the keys of their chains. Second, the operations, already
// shrunk to those that are necessary: "add pod3 &" starts and the next operation begins at once, "[kill at write 4]"
// ends the process before its 4th write, "[fail at kernel: remove 1]" makes the first effect fail whose text begins so,
// "[tamper at …]" lets another program change rules before it, "[pause at …]" lets all others go on first, and an operation
// with "[begin at …]" waits for such an effect of any process. "next" has no process of its own: its event happens to the
// one whose effect it is. "run" is a reconciler that stays, "once" a single sync, "stale add" an ADD with another policy than
// the conflist has, "agree" a STATUS and an ADD in the same state, "main" a write of the conflist by the main CNI plugin
// where reconcilers manage the entry (manage_test.go). Third, the trace: one line for each effect, with its number, the
// process that had it, and what it was (a call on files, or one at a port of the packet filter); what a verb wrote to stderr,
// and a sync's problems, follow its last line; the log of a reconciler that stays comes when the node is quiet. Fourth, the objection.
// The last effect before OBJECTION is the one that made the packet wrong; read the trace backwards from there. The objection
// about a packet lists the combinations of versions that may be in force, one of which each packet has to follow.
// pod100 and later are addresses that no pod has. "early" is a pod that starts without an ADD, before the conflist has an
// entry, and "clock" a step of the wall clock.
//
// # How it works
//
// TestSimulation builds itself again with an overlay (go help build) in which the product's calls of packages os and unix
// are those of package system: files in memory, of which a crash keeps what was synced and some of the rest. The packet
// filter is kernel (package netfiltertest). Each process is a goroutine of one
// testing/synctest bubble, a reconciler several; one of them runs at a time, from effect to effect (world). What the
// scenario states is in scenario_test.go, what processes and disturbances do in ops_test.go and reconciler_test.go. The
// oracle (oracle_test.go) knows only what the scenario has stated: the versions that may be in force because of an operation
// are its claims, and decide is section 3.1 of the contract written once more.
//
// # What it tolerates
//
// Where the oracle must be tolerant, a comment beside the condition gives the reason. These are the tolerances:
//
//   - While another program's change of owned rules is not repaired, a packet may be anything, but is dropped only where a
//     policy drops it or that program changed the guard itself.
//   - A pod whose ADD returned while a document was damaged is in no namespace, as its chain stays as it is, until the
//     documents are written again, unless a damaged one is removed before.
//   - Rules that stay beside a damaged document may exempt the former pod of an address until the next sync. A chain that the
//     kernel refuses is missing after a boot.
//   - A chain that was not removed, as that failed, the guards could not be read or the kernel refuses another one, masquerades
//     as before until a reconciler's sync, and one that is not on record, as the record was lost while it got another name or
//     its document went, for good, or goes before the new one is in another backend. Until something has passed without a fault
//     after a boot, a chain may be missing.
//   - A document that a process wrote may be lost in a crash, or be the one before, if the process was killed or its sync of
//     the directory failed: another process does not sync it again.
//   - A damaged or lost document may be without effect once its chains are gone, and the subnets of pods are lost with it.
//     The guard of its policy then comes before its rules, as on a node without rules.
//   - After a fault a reconciler may back off for 75 s, after a fight with another program for 5 minutes, and for a minute
//     after a process was frozen that may have held the lock.
//   - A running reconciler may store the agent files of a moment ago after "once" has stored newer ones.
//   - An ADD passes where the kernel refuses the chain of another network, which then does not exempt its pod, and where a
//     call for that chain failed.
//   - Packets may follow several policies at the same time while a chain gets another name or backend.
//   - Walks may delete more connections after a fault and after processes that ran at the same time, and those of an address
//     that has passed to a pod of another namespace.
//   - An ADD that fails may have stored its policy, unless it answers 7, or 11 on a good disk. It may fail where another program changes rules
//     twice meanwhile.
//   - STATUS does not know a guard that the kernel refuses if its pod range is the subnet of the pod whose ADD comes next.
//   - Connections are not judged where the resets that were due may have been lost, after faults in the same boot and where a
//     walk came between a policy that was stored and its rules, as their process was killed, nor those that begin while rules
//     are wrong if the repair may come with other exempt pods or outputAddresses, or if they became wrong while a process was
//     at work: it decides what to reset when it reads the rules. Those of a former pod are judged only if
//     the policies that are in force were in force when they began, and none by the address that it leaves with if it began
//     beside a chain that could not be removed.
//   - A temporary file that a boot left beside the conflists stays until one of them is written.
//   - A pod that started without an ADD has the verdict of a pod without a namespace until a sync has recorded it.
//   - A network that is unused may be dropped as soon as the wall clock is set forward.
//
// Not simulated are symlinks, several dataDirs, documents of newer versions, and sources that conflict. A dump that another
// program's commit tears is simulated on a quiet node only.
//
// A function of packages os or unix that the product uses for the first time stops the build with its name: add it to
// package system.
package simulation
