// SPDX-License-Identifier: Apache-2.0

// Package policy computes the rules that the kernel must have from what the
// sources of policy ask for. The plugin and the reconciler call it in this order:
// SourcePolicy.Validate, Merge, Desired, Compare; explain calls Policy.Decide. The
// package is pure: it imports nothing else of this module and reads no file, no
// clock and no kernel, so the plugin and the reconciler compute the same rules from
// the same sources.
package policy
