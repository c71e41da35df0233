// SPDX-License-Identifier: Apache-2.0

// Package explain answers what becomes of traffic to a destination, who said
// so, and whether the kernel does the same.
//
// What it owns is this invariant: a verdict is that of policy.Decide and of
// nothing else, and the kernel is said to agree only where the rules that were
// read of it decide the same for the same packet. What could not be read, or
// could decide before our rules do, counts as no agreement.
//
// It reads no file and no kernel: it is given a view, the contributions behind it
// and the conflists. The reconciler's commands may import it.
package explain
