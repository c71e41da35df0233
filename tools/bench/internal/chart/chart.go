// SPDX-License-Identifier: Apache-2.0

// Package chart draws figures as SVG: lines over a count, and bars. What it owns
// is how all plots of the report look, so that they can be read side by side: a
// form has the same colour in each, spread is drawn and axes name their unit.
package chart
