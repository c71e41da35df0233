// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

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

// Lines draws lines over a count, both axes logarithmic. A count of 0 stands left
// of all others.
func Lines(title, x, y string, lines []Line) ([]byte, error) {
	p := newPlot(title, x, y)
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	counts := map[int]bool{}
	low, high := math.Inf(1), math.Inf(-1)
	for i, l := range lines {
		var points plotter.XYs
		var bars errorPoints
		for _, at := range l.Points {
			if len(at.Figure) == 0 {
				continue
			}
			counts[at.Count] = true
			median := at.Figure.Median()
			points = append(points, plotter.XY{X: place(at.Count), Y: median})
			first, third := at.Figure.Quantile(0.25), at.Figure.Quantile(0.75)
			bars.XYs = append(bars.XYs, plotter.XY{X: place(at.Count), Y: median})
			bars.YErrors = append(bars.YErrors, struct{ Low, High float64 }{median - first, third - median})
			low, high = min(low, first), max(high, third)
		}
		if len(points) == 0 {
			continue
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, fmt.Errorf("draw %s: %w", title, err)
		}
		spread, err := plotter.NewYErrorBars(bars)
		if err != nil {
			return nil, fmt.Errorf("draw %s: %w", title, err)
		}
		s := styleOf(l.Name, i)
		line.Color, line.Width, line.Dashes = s.color, vg.Points(1.6), s.dashes
		dots.Color, dots.Radius, dots.Shape = s.color, vg.Points(3), s.shape
		spread.Color, spread.Width = s.color, vg.Points(1)
		p.Add(line, dots, spread)
		p.Legend.Add(plain(l.Name), line, dots)
	}
	if len(counts) == 0 {
		return nil, fmt.Errorf("draw %s: no figures", title)
	}
	// Room for the legend above the lines.
	p.Y.Min, p.Y.Max = low/1.3, high*1.2*math.Pow(high/low, 0.05*float64(len(lines)))
	p.X.Min, p.X.Max = place(slices.Min(keys(counts)))/1.4, place(slices.Max(keys(counts)))*1.4
	p.X.Tick.Marker = countTicks(keys(counts))
	p.Y.Tick.Marker = decades{}
	return render(p, 17*vg.Centimeter, 10.5*vg.Centimeter)
}

// plain is a name without the marks of Markdown.
func plain(name string) string { return strings.ReplaceAll(name, "`", "") }

// errorPoints are points with their spread.
type errorPoints struct {
	plotter.XYs
	plotter.YErrors
}

// place is where a count stands on a logarithmic axis.
func place(count int) float64 { return math.Max(float64(count), 1) }

func keys(counts map[int]bool) []int {
	var all []int
	for c := range counts {
		all = append(all, c)
	}
	slices.Sort(all)
	return all
}

type countTicks []int

// Ticks implements plot.Ticker: a mark for each count that was measured.
func (t countTicks) Ticks(float64, float64) []plot.Tick {
	var ticks []plot.Tick
	for _, c := range t {
		ticks = append(ticks, plot.Tick{Value: place(c), Label: Thousands(c)})
	}
	return ticks
}

// Thousands writes 10,000.
func Thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// decades are the ticks of a logarithmic axis of figures: 1, 2, 5, 10 labelled.
type decades struct{}

// Ticks implements plot.Ticker.
func (decades) Ticks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	wide := math.Log10(high/low) > 2.2
	for e := math.Floor(math.Log10(low)); e <= math.Ceil(math.Log10(high)); e++ {
		for m := 1.0; m < 10; m++ {
			v := m * math.Pow(10, e)
			if v < low || v > high {
				continue
			}
			t := plot.Tick{Value: v}
			if m == 1 || !wide && (m == 2 || m == 5) {
				t.Label = strconv.FormatFloat(v, 'g', 3, 64)
				if v >= 1000 {
					t.Label = Thousands(int(v + 0.5))
				}
			}
			ticks = append(ticks, t)
		}
	}
	return ticks
}

// Row is a contender of a comparison: its ratio to the base, and what it may be.
type Row struct {
	Name   string
	Ratio  measure.Estimate
	Budget float64 // 0: none
}

// Ratios draws a row for each contender, on a logarithmic axis: the ratio with its
// interval, and the budget as a bar across.
func Ratios(title, x string, rows []Row) ([]byte, error) {
	p := newPlot(title, x, "")
	p.X.Scale = plot.LogScale{}
	p.Y.Padding = vg.Points(8)
	low, high := 1.0, 1.0
	names := make([]string, len(rows))
	var contenders []string
	for _, r := range rows {
		contenders = append(contenders, r.Name)
	}
	rank := ranks(contenders)
	var budgets plotter.XYs
	for i, r := range rows {
		at := float64(len(rows) - 1 - i)
		names[len(rows)-1-i] = plain(r.Name)
		dots, err := plotter.NewScatter(plotter.XYs{{X: r.Ratio.Median, Y: at}})
		if err != nil {
			return nil, fmt.Errorf("draw %s: %w", title, err)
		}
		spread, err := plotter.NewLine(plotter.XYs{{X: r.Ratio.Low, Y: at}, {X: r.Ratio.High, Y: at}})
		if err != nil {
			return nil, fmt.Errorf("draw %s: %w", title, err)
		}
		s := styleOf(r.Name, rank[i])
		dots.Color, dots.Radius, dots.Shape = s.color, vg.Points(3.2), s.shape
		spread.Color, spread.Width = s.color, vg.Points(1.4)
		p.Add(spread, dots)
		low, high = min(low, r.Ratio.Low), max(high, r.Ratio.High)
		if r.Budget > 0 {
			budgets = append(budgets, plotter.XY{X: r.Budget, Y: at})
			high = max(high, r.Budget)
		}
	}
	if len(budgets) > 0 {
		marks, err := plotter.NewScatter(budgets)
		if err != nil {
			return nil, fmt.Errorf("draw %s: %w", title, err)
		}
		marks.Shape, marks.Radius, marks.Color = barGlyph{}, vg.Points(6), budgetColor()
		p.Add(marks)
		p.X.Label.Text += " (red: the budget)"
	}
	p.NominalY(names...)
	p.Y.Tick.Length = 0
	p.Y.Min, p.Y.Max = -0.6, float64(len(rows))-0.4
	p.X.Min, p.X.Max = low/1.15, high*1.25
	p.X.Tick.Marker = decades{}
	return render(p, 17*vg.Centimeter, vg.Length(2.6+0.55*float64(len(rows)))*vg.Centimeter)
}

// barGlyph is an upright bar.
type barGlyph struct{}

// DrawGlyph implements draw.GlyphDrawer.
func (barGlyph) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	c.SetLineStyle(draw.LineStyle{Color: s.Color, Width: vg.Points(2)})
	var path vg.Path
	path.Move(vg.Point{X: at.X, Y: at.Y - s.Radius})
	path.Line(vg.Point{X: at.X, Y: at.Y + s.Radius})
	c.Stroke(path)
}
