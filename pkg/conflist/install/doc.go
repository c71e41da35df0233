// SPDX-License-Identifier: Apache-2.0

// Package install brings the plugin's binary to a node and removes it.
//
// Locate finds the directories of the container runtime, Copy puts the binary into the plugin
// directory, and an Uninstall removes the plugin entries, the binary, the rules and the state, in
// this order; the commands install and uninstall call them. Invariant: a conflist with the plugin
// entry stands beside a binary that runs there, and so does each container that the runtime will
// end by a conflist which it has cached. This holds at any instant, even if the process is killed;
// the next call completes what it left. A binary is never written in place: a process that runs it
// meanwhile has a whole one.
package install
