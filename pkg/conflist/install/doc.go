// SPDX-License-Identifier: Apache-2.0

// Package install installs or uninstalls the plugin on a node. Locate finds the directories of the
// container runtime, Copy copies the binary to the plugin directory, and an Uninstall removes the
// plugin entries, the binary, the rules and the state, in this order; the commands install and
// uninstall call them. Invariant: while a conflist has the plugin entry, or a runtime will end a
// container by a cached conflist that has it, there is a binary that runs. This holds at any
// instant, even if the process is killed; the next call completes what it left. A binary is never
// written in place: a process that runs it meanwhile has a whole one.
package install
