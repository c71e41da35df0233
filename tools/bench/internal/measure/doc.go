// SPDX-License-Identifier: Apache-2.0

// Package measure times contenders in turn and writes their costs in the Go benchmark format. All
// contenders run in each round, in a shuffled order, because the speed of a shared machine changes
// from second to second.
package measure
