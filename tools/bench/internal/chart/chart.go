// SPDX-License-Identifier: Apache-2.0

// Package chart draws lines over a count as SVG for the page of benchmarks.
package chart

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"

	"github.com/aclements/go-moremath/stats"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Line is a contender's medians over a count.
type Line struct {
	Name string
	plotter.XYs
}

// Add adds the median of figures at a count, in units of so many.
func (l *Line) Add(count int, figures []float64, unit float64) {
	l.XYs = append(l.XYs, plotter.XY{X: float64(count), Y: stats.Sample{Xs: figures}.Quantile(0.5) / unit})
}

// Lines draws lines over a count. Both axes are logarithmic. No two lines have the same colour and shape.
func Lines(title, x, y string, lines []Line) ([]byte, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x+" (logarithmic)", y+" (logarithmic)"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.Y.Tick.Marker = plot.LogTicks{Prec: -1}
	p.Legend.Left, p.Legend.Top = true, true
	p.Legend.Padding = vg.Points(2)
	p.Add(plotter.NewGrid())
	var named []any
	var counts []float64
	for _, l := range lines {
		named = append(named, l.Name, l.XYs)
		for _, point := range l.XYs {
			counts = append(counts, point.X)
		}
	}
	if err := plotutil.AddLinePoints(p, named...); err != nil {
		return nil, fmt.Errorf("draw %s: %w", title, err)
	}
	slices.Sort(counts)
	var ticks plot.ConstantTicks
	for _, count := range slices.Compact(counts) {
		ticks = append(ticks, plot.Tick{Value: count, Label: strconv.Itoa(int(count))})
	}
	p.X.Tick.Marker = ticks
	p.Y.Max *= 4 // room for the legend
	canvas := vgsvg.New(19*vg.Centimeter, 13*vg.Centimeter)
	p.Draw(draw.Crop(draw.New(canvas), 0, -vg.Centimeter/2, 0, 0)) // room for the last number
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, fmt.Errorf("write SVG: %w", err)
	}
	// Few machines have the fonts of gonum.
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Serif"), []byte("font-family:Liberation Serif,Times New Roman,serif")), nil
}
