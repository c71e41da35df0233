// SPDX-License-Identifier: Apache-2.0

// Package chart draws lines over a count as SVG for the page of benchmarks.
package chart

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/aclements/go-moremath/stats"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/palette/brewer"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Line is a contender's figures over a count.
type Line struct {
	Name   string
	Counts []int
	// Figures has one series for each count.
	Figures [][]float64
}

// Add adds figures at a count, in units of so many.
func (l *Line) Add(count int, figures []float64, unit float64) {
	var scaled []float64
	for _, v := range figures {
		scaled = append(scaled, v/unit)
	}
	l.Counts, l.Figures = append(l.Counts, count), append(l.Figures, scaled)
}

// Lines draws medians over a count, with bars to the quartiles. Both axes are logarithmic. No two lines
// have the same colour and shape.
func Lines(title, x, y string, lines []Line) ([]byte, error) {
	const width, height = 19 * vg.Centimeter, 13 * vg.Centimeter
	const hues = 7 // gonum has 8 shapes
	colors, err := brewer.GetPalette(brewer.TypeQualitative, "Dark2", hues)
	if err != nil {
		return nil, err
	}
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x+" (logarithmic)", y+" (logarithmic; bars: quartiles)"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.Y.Tick.Marker = plot.LogTicks{Prec: -1}
	p.Legend.Left, p.Legend.Top = true, true
	p.Legend.Padding = vg.Points(2)
	p.Add(plotter.NewGrid())
	var counts []int
	for i, l := range lines {
		points := points(l)
		dots, err := plotter.NewScatter(points.XYs)
		if err != nil {
			return nil, fmt.Errorf("draw %s: %s: %w", title, l.Name, err)
		}
		spread, err := plotter.NewYErrorBars(points)
		if err != nil {
			return nil, fmt.Errorf("draw %s: %s: %w", title, l.Name, err)
		}
		curve := &plotter.Line{XYs: points.XYs, LineStyle: plotter.DefaultLineStyle}
		color := colors.Colors()[i%hues]
		dots.Color, spread.Color, curve.Color = color, color, color
		dots.Shape, dots.Radius = plotutil.Shape(i), vg.Points(3)
		if strings.HasPrefix(l.Name, "ip-masq") {
			curve.Width = vg.Points(2)
		}
		p.Add(curve, spread, dots)
		p.Legend.Add(l.Name, curve, dots)
		counts = append(counts, l.Counts...)
	}
	p.X.Tick.Marker = ticks(counts)
	p.Y.Max *= 4 // room for the legend
	canvas := vgsvg.New(width, height)
	p.Draw(draw.New(canvas))
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, fmt.Errorf("write SVG: %w", err)
	}
	// Few machines have the fonts of gonum.
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Serif"), []byte("font-family:Liberation Serif,Times New Roman,serif")), nil
}

// spreadPoints are points with their spread.
type spreadPoints struct {
	plotter.XYs
	plotter.YErrors
}

func points(l Line) (all spreadPoints) {
	for i, f := range l.Figures {
		sample := stats.Sample{Xs: f} // as benchstat
		median := sample.Quantile(0.5)
		all.XYs = append(all.XYs, plotter.XY{X: float64(l.Counts[i]), Y: median})
		all.YErrors = append(all.YErrors, struct{ Low, High float64 }{median - sample.Quantile(0.25), sample.Quantile(0.75) - median})
	}
	return all
}

// ticks returns a tick for each count.
func ticks(counts []int) plot.ConstantTicks {
	slices.Sort(counts)
	var all plot.ConstantTicks
	for _, c := range slices.Compact(counts) {
		all = append(all, plot.Tick{Value: float64(c), Label: strconv.Itoa(c)})
	}
	return all
}
