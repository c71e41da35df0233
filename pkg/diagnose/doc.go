// SPDX-License-Identifier: Apache-2.0

// Package diagnose answers an operator's questions about a node. Explain, for the
// command explain, tells what the policy and the kernel do with a packet, and which key
// of which file decides. Examine, for the command doctor, looks for what defeats the
// policy: third-party rules, plugins and agents that masquerade too, settings of the
// kernel, and files that are loaded at boot. The commands of the reconciler call them.
// The package only reads; no check hides another, and what a check could not read is a
// finding too. The ID of a finding never changes.
package diagnose
