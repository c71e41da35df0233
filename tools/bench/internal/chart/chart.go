// SPDX-License-Identifier: Apache-2.0

// Package chart draws figures as SVG for the benchmark report: lines over a count, and bars. All
// plots look alike: a contender has the same colour in each, no two lines of a plot look the same,
// spread is drawn, axes name their unit and scale, and text keeps its position with any font.
package chart
