// SPDX-License-Identifier: Apache-2.0

// Package chart draws figures as SVG: lines over a count, and bars. What it owns
// is how all plots of the report look, so that they can be read side by side: a
// contender has the same colour in each and looks like no other of its plot, spread
// is drawn, axes name their unit and scale, and text stays in its place whatever
// fonts the reader has.
package chart
