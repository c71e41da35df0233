// SPDX-License-Identifier: Apache-2.0

// Package conflist finds the network that a runtime uses, and puts our entry
// into its configuration list or takes it out again.
//
// Its invariant: a file of a configuration directory is at any instant, and
// after a kill at any instant, a whole one that libcni loads, either as it was or
// as it is to be. Nothing is made of a text that libcni does not load, and
// whatever is made of one is loaded again, and held against it, before it is
// handed out. Of a list's text only our entry comes or goes: every other byte
// stays. What counts is that the entry is there, neither where nor what it says.
//
// # Decisions
//
// More than one entry of ours collapses to the first: the plugin would otherwise
// run twice on each ADD, and the first is the one that config.ConfDir goes by.
//
// A symlink is followed: its target is replaced, in the target's own directory,
// and the link stays. Runtimes watch the directory of the link alone, so a
// temporary file comes and goes there to make them look.
//
// Of Find's choice, a list whose only plugin is "loopback" is never the network
// that a runtime "uses": on a node that has nothing else yet, the main plugin is
// still to come.
//
// The reconciler and install may import it. Of this module it imports config,
// safefile and policy alone.
package conflist
