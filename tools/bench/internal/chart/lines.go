// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
)

// Line is a contender's figures over a count.
type Line struct {
	Name   string
	Points []Point
}

// Point is a median at a count, with the quartiles.
type Point struct {
	Count  int
	Figure measure.Series
}

// Lines draws lines over a count, both axes logarithmic. A count of 0 is left of the others, beyond
// a break, and no line leads to it.
func Lines(title, x, y string, lines []Line) ([]byte, error) {
	all := countsOf(lines)
	if len(all) == 0 {
		return nil, fmt.Errorf("draw %s: no figures", title)
	}
	s := newSheet(title, x+" (logarithmic)", y+" (logarithmic; bars: quartiles)")
	if all.broken() {
		s.x = x + " (logarithmic, but for 0)"
		s.Add(gap{math.Sqrt(all.place(0) * all.place(all[1]))})
	}
	s.X.Scale, s.Y.Scale = plot.LogScale{}, plot.LogScale{}
	var names []string
	for _, l := range lines {
		names = append(names, l.Name)
	}
	styles := stylesOf(names)
	low, high := math.Inf(1), math.Inf(-1)
	for i, l := range lines {
		first, third, err := s.addLine(l, styles[i], all)
		if err != nil {
			return nil, fmt.Errorf("draw %s: %s: %w", title, l.Name, err)
		}
		low, high = min(low, first), max(high, third)
	}
	room := math.Max(1.1, math.Pow(high/low, 0.04))
	s.Y.Min, s.Y.Max = low/room, high*room
	s.X.Min, s.X.Max = all.limits()
	s.X.Tick.Marker, s.Y.Tick.Marker = all, decades{}
	return s.render(10 * vg.Centimeter)
}

// countsOf returns the measured counts.
func countsOf(lines []Line) counts {
	var all counts
	for _, l := range lines {
		for _, at := range l.Points {
			if len(at.Figure) > 0 {
				all = append(all, at.Count)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// addLine draws a line and returns the range of its figures.
func (s *sheet) addLine(l Line, how style, all counts) (low, high float64, err error) {
	low, high = math.Inf(1), math.Inf(-1)
	var joined plotter.XYs
	var points errorPoints
	for _, at := range l.Points {
		if len(at.Figure) == 0 {
			continue
		}
		median, first, third := at.Figure.Median(), at.Figure.Quantile(0.25), at.Figure.Quantile(0.75)
		if !(first > 0) {
			return 0, 0, fmt.Errorf("%g has no place on a logarithmic axis", first)
		}
		low, high = min(low, first), max(high, third)
		p := plotter.XY{X: all.place(at.Count), Y: median}
		points.XYs = append(points.XYs, p)
		points.YErrors = append(points.YErrors, struct{ Low, High float64 }{median - first, third - median})
		if at.Count > 0 {
			joined = append(joined, p)
		}
	}
	if len(points.XYs) == 0 {
		return low, high, nil
	}
	dots, err := plotter.NewScatter(points.XYs)
	if err != nil {
		return 0, 0, err
	}
	spread, err := plotter.NewYErrorBars(points)
	if err != nil {
		return 0, 0, err
	}
	dots.Color, dots.Radius, dots.Shape = how.color, vg.Points(3), how.shape
	spread.Color, spread.Width = how.color, vg.Points(0.8)
	curve := &plotter.Line{XYs: joined}
	curve.Color, curve.Width, curve.Dashes = how.color, how.width, how.dashes
	if len(joined) > 1 {
		s.Add(curve)
	}
	s.Add(spread, dots)
	s.legend = append(s.legend, entry{plain(l.Name), []plot.Thumbnailer{curve, dots}})
	return low, high, nil
}

// errorPoints are points with their spread.
type errorPoints struct {
	plotter.XYs
	plotter.YErrors
}
