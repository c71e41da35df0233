// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"math"

	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// Shapes of points. Their strokes are visible over lines and bars, unlike those of gonum.
const (
	circle   = 24 // corners
	square   = 4
	triangle = 3
)

// polygon is a regular polygon, on its side or turned by half an angle.
type polygon struct {
	corners        int
	turned, hollow bool
}

// DrawGlyph implements draw.GlyphDrawer.
func (p polygon) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	each := 2 * math.Pi / float64(p.corners)
	start := each/2 - math.Pi/2
	if p.turned {
		start += each / 2
	}
	// All have the same area.
	r := s.Radius * vg.Length(math.Sqrt(math.Pi/(float64(p.corners)/2*math.Sin(each))))
	var corners []vg.Point
	for i := range p.corners + 1 {
		sin, cos := math.Sincos(start + each*float64(i))
		corners = append(corners, vg.Point{X: at.X + r*vg.Length(cos), Y: at.Y + r*vg.Length(sin)})
	}
	if !p.hollow {
		c.FillPolygon(s.Color, corners)
		return
	}
	c.FillPolygon(paper(), corners)
	c.StrokeLines(draw.LineStyle{Color: s.Color, Width: vg.Points(1.2)}, corners)
}

// strokes are two that cross, upright or turned by half an angle.
type strokes struct{ turned bool }

// DrawGlyph implements draw.GlyphDrawer.
func (f strokes) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	a, b := vg.Point{X: 1.2 * s.Radius}, vg.Point{Y: 1.2 * s.Radius}
	if f.turned {
		a, b = vg.Point{X: s.Radius, Y: s.Radius}, vg.Point{X: s.Radius, Y: -s.Radius}
	}
	how := draw.LineStyle{Color: s.Color, Width: vg.Points(2)}
	c.StrokeLines(how, []vg.Point{at.Sub(a), at.Add(a)}, []vg.Point{at.Sub(b), at.Add(b)})
}

// barGlyph is an upright bar.
type barGlyph struct{}

// DrawGlyph implements draw.GlyphDrawer.
func (barGlyph) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	c.StrokeLine2(draw.LineStyle{Color: s.Color, Width: vg.Points(2)}, at.X, at.Y-s.Radius, at.X, at.Y+s.Radius)
}
