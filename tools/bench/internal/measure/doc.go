// SPDX-License-Identifier: Apache-2.0

// Package measure times contenders in turn and computes their ratios with confidence intervals. It
// compares only figures of the same round, in a shuffled order, because the speed of a shared
// machine changes from second to second.
package measure
