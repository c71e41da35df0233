// SPDX-License-Identifier: Apache-2.0

// Package diagnose answers questions about a node that runs ip-masq. Examine, for the
// command doctor, looks for what defeats the policy or will surprise: third-party rules,
// plugins and agents that masquerade too, settings of the kernel, and files that are
// loaded at boot. The commands of the reconciler call it. Its invariant: it only reads,
// and no check hides another; what a check could not read is a finding too. The ID of a
// finding never changes.
package diagnose
