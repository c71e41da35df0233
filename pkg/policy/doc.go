// SPDX-License-Identifier: Apache-2.0

// Package policy decides: what sources state about a masquerade chain, what
// holds when they are merged, which rules the kernel must therefore have, and
// how those differ from the rules it has.
//
// The way through it is
//
//	Statement → Contribution → Merge → Policy → Chains → Ruleset → Compare
//
// The package is pure. It imports nothing else of this module, reads no file,
// no clock and no kernel, and the linter holds it to that; so the plugin and
// the reconciler, which both call it, cannot disagree about the desired rules.
package policy
