// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"image/color"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
)

// Row is a contender of a comparison: its ratio to the base and its budget.
type Row struct {
	Name   string
	Ratio  measure.Estimate
	Budget float64 // 0: none
}

// Ratios draws a row for each contender on a logarithmic axis: the ratio with its interval, and the
// budget as a vertical bar.
func Ratios(title, x string, rows []Row) ([]byte, error) {
	if len(rows) == 0 {
		return nil, fmt.Errorf("draw %s: no figures", title)
	}
	s := newSheet(title, x+" (logarithmic)", "")
	s.X.Scale = plot.LogScale{}
	s.Y.Padding = vg.Points(8)
	var names []string
	for _, r := range rows {
		names = append(names, plain(r.Name))
	}
	base := plotter.Line{XYs: plotter.XYs{{X: 1, Y: -0.6}, {X: 1, Y: float64(len(rows)) - 0.4}}}
	base.Color, base.Width = color.Gray{130}, vg.Points(0.8)
	s.Add(&base)
	styles := stylesOf(names)
	low, high := 1.0, 1.0
	var budgets plotter.XYs
	for i, r := range rows {
		if !(r.Ratio.Low > 0) {
			return nil, fmt.Errorf("draw %s: %s: %g has no place on a logarithmic axis", title, r.Name, r.Ratio.Low)
		}
		at := float64(len(rows) - 1 - i)
		dots, err := plotter.NewScatter(plotter.XYs{{X: r.Ratio.Median, Y: at}})
		if err != nil {
			return nil, fmt.Errorf("draw %s: %s: %w", title, r.Name, err)
		}
		spread, err := plotter.NewLine(plotter.XYs{{X: r.Ratio.Low, Y: at}, {X: r.Ratio.High, Y: at}})
		if err != nil {
			return nil, fmt.Errorf("draw %s: %s: %w", title, r.Name, err)
		}
		dots.Color, dots.Radius, dots.Shape = styles[i].color, vg.Points(3.2), styles[i].shape
		spread.Color, spread.Width = styles[i].color, styles[i].width
		s.Add(spread, dots)
		low, high = min(low, r.Ratio.Low), max(high, r.Ratio.High)
		if r.Budget > 0 {
			budgets = append(budgets, plotter.XY{X: r.Budget, Y: at})
			low, high = min(low, r.Budget), max(high, r.Budget)
		}
	}
	if len(budgets) > 0 {
		marks, err := plotter.NewScatter(budgets)
		if err != nil {
			return nil, fmt.Errorf("draw %s: budgets: %w", title, err)
		}
		marks.Shape, marks.Radius, marks.Color = barGlyph{}, vg.Points(6), budgetColor()
		s.Add(marks)
		s.x = x + " (logarithmic; red: the budget)"
	}
	slices.Reverse(names)
	s.NominalY(names...)
	s.Y.Min, s.Y.Max = -0.6, float64(len(rows))-0.4
	s.X.Min, s.X.Max = low/1.1, high*1.1
	s.X.Tick.Marker = decades{}
	return s.render(vg.Length(0.55*float64(len(rows))) * vg.Centimeter)
}
