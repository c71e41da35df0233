// SPDX-License-Identifier: Apache-2.0

// Package measure times contenders in turn and says what the figures are worth.
//
// What it owns is this invariant: a comparison is made of figures that were
// taken within one round, in a shuffled order. A machine that others use
// changes its speed from second to second, so the ratio of two medians that were
// taken one after the other says more about the others than about the
// contenders.
package measure
