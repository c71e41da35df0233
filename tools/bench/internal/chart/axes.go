// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"math"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// counts are the measured counts, in order, on a logarithmic axis. 0 is left of the first count,
// beyond a break.
type counts []int

func (cs counts) broken() bool { return len(cs) > 1 && cs[0] == 0 }

// share returns the length of hundredths of the axis between the first and the last count except 0.
func (cs counts) share(hundredths float64) float64 {
	from, to := cs[0], cs[len(cs)-1]
	if cs.broken() {
		from = cs[1]
	}
	return math.Max(1.1, math.Pow(float64(to)/math.Max(float64(from), 1), hundredths/100))
}

// place returns the position of a count.
func (cs counts) place(count int) float64 {
	if count > 0 {
		return float64(count)
	}
	if !cs.broken() {
		return 1
	}
	return float64(cs[1]) / math.Max(1.5, cs.share(14))
}

// limits returns the ends of the axis.
func (cs counts) limits() (low, high float64) {
	room := cs.share(4)
	return cs.place(cs[0]) / room, cs.place(cs[len(cs)-1]) * room
}

// Ticks implements plot.Ticker: a mark for each count that was measured.
func (cs counts) Ticks(float64, float64) []plot.Tick {
	var ticks []plot.Tick
	for _, c := range cs {
		ticks = append(ticks, plot.Tick{Value: cs.place(c), Label: Thousands(c)})
	}
	return ticks
}

// gap is a break in the axis x, through the grid too.
type gap struct{ at float64 }

// Plot implements plot.Plotter.
func (g gap) Plot(c draw.Canvas, p *plot.Plot) {
	const half, slant = 3.0, 2.0
	toX, _ := p.Transforms(&c)
	x, axis := toX(g.at), c.Min.Y-p.X.Padding
	c.FillPolygon(paper(), []vg.Point{
		{X: x - half, Y: axis - half}, {X: x + half, Y: axis - half}, {X: x + half, Y: c.Max.Y}, {X: x - half, Y: c.Max.Y},
	})
	for _, edge := range []vg.Length{x - half, x + half} {
		c.StrokeLine2(p.X.LineStyle, edge-slant, axis-2*slant, edge+slant, axis+2*slant)
	}
}

// decades are the ticks of a logarithmic axis: 1, 2, 5, 10 have labels if there is room, more ticks
// if these are few.
type decades struct {
	length vg.Length // of the axis
	each   vg.Length // what a label takes
}

// Ticks implements plot.Ticker.
func (d decades) Ticks(low, high float64) []plot.Tick {
	steps := [][]float64{{1}, {1, 2, 5}, {1, 1.5, 2, 3, 5, 7}, {1, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8, 9}}
	labelled := within(steps[0], low, high)
	for _, step := range steps[1:] {
		finer := within(step, low, high)
		if len(labelled) > 3 || !d.fit(finer, high/low) {
			break
		}
		labelled = finer
	}
	// The marks without labels are those of logarithmic paper.
	ticks := []plot.Tick{}
	for _, v := range within([]float64{1, 2, 3, 4, 5, 6, 7, 8, 9}, low, high) {
		if !slices.Contains(labelled, v) {
			ticks = append(ticks, plot.Tick{Value: v})
		}
	}
	for _, v := range labelled {
		label := strconv.FormatFloat(v, 'g', 3, 64)
		if v >= 1000 {
			label = Thousands(int(v + 0.5))
		}
		ticks = append(ticks, plot.Tick{Value: v, Label: label})
	}
	return ticks
}

// within are the steps of all decades that lie on an axis.
func within(steps []float64, low, high float64) []float64 {
	var all []float64
	for e := math.Floor(math.Log10(low)); e <= math.Ceil(math.Log10(high)); e++ {
		for _, s := range steps {
			if v := s * math.Pow(10, e); v >= low && v <= high {
				all = append(all, v)
			}
		}
	}
	return all
}

// fit reports whether the labels fit on an axis whose ends have this ratio.
func (d decades) fit(labels []float64, ratio float64) bool {
	for i := 1; i < len(labels); i++ {
		if vg.Length(math.Log(labels[i]/labels[i-1])/math.Log(ratio))*d.length < d.each {
			return false
		}
	}
	return true
}
