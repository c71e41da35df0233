// SPDX-License-Identifier: Apache-2.0

// Package explain answers what becomes of traffic to a destination, who said
// so, and whether the kernel does the same.
//
// What it owns is this invariant: a verdict is that of policy.Decide and of
// nothing else, and the kernel is said to agree only where packets get that
// verdict, whoever wrote the rule that gives it. What could not be read, and may
// decide, counts as no agreement.
//
// It reads no file and no kernel: it is given a view, the contributions behind it,
// the conflists, and what finds the third-party rules that traffic meets. The
// reconciler's commands may import it.
package explain
