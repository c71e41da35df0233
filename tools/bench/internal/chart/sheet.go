// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

const (
	width  = 190 * pixels // of all pictures
	margin = 12
	pixels = 3   // points, which are 4 pixels: else the edge is half transparent
	small  = 9.0 // points, of all text but the title
	line   = 14  // points, from a line of text to the next
)

// sheet is a plot with titles of its axes, because gonum centres those of a logarithmic axis
// wrongly, and with a legend outside of the lines.
type sheet struct {
	*plot.Plot
	x, y   string
	legend []entry
}

// entry is a line of the legend.
type entry struct {
	name   string
	thumbs []plot.Thumbnailer
}

func newSheet(title, x, y string) *sheet {
	s := &sheet{Plot: plot.New(), x: x, y: y}
	s.Title.Text, s.Title.Padding = title, vg.Points(8)
	s.Title.TextStyle = newText(vg.Points(11), draw.XCenter)
	s.Title.TextStyle.YAlign = draw.YTop
	s.X.Padding, s.Y.Padding = vg.Points(4), vg.Points(4)
	s.X.Tick.Label, s.Y.Tick.Label = newText(small, draw.XCenter), newText(small, draw.XRight)
	s.X.Tick.Label.YAlign, s.Y.Tick.Label.YAlign = draw.YTop, draw.YCenter
	s.X.Tick.Length, s.Y.Tick.Length = vg.Points(5), vg.Points(5)
	s.BackgroundColor = nil // that of the whole picture
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.Gray{225}, color.Gray{225}
	s.Add(grid)
	return s
}

func paper() color.Color { return color.White }

// render writes the plot with this height between its axes.
func (s *sheet) render(height vg.Length) ([]byte, error) {
	const around = 4 * line // the title, the labels of the axis and its title
	rows := (len(s.legend) + 1) / 2
	below := vg.Length(rows*line) + margin/2
	if rows == 0 {
		below = 0
	}
	height = pixels * vg.Length(math.Ceil(float64(height+2*margin+around+below)/pixels))
	canvas := vgsvg.New(width, height)
	all := draw.NewCanvas(canvas, width, height)
	// The page of the reader may be dark.
	all.FillPolygon(paper(), []vg.Point{{}, {X: width}, {X: width, Y: height}, {Y: height}})
	inner := draw.Crop(all, margin, -margin, margin, -margin)
	area := draw.Crop(inner, 0, 0, below+line, 0)
	if s.y != "" {
		area.Min.X += line
	}
	s.label(area)
	s.Draw(area)
	data := s.DataCanvas(area)
	title := newText(small, draw.XCenter)
	all.FillText(title, vg.Point{X: data.Center().X, Y: inner.Min.Y + below + line/3}, s.x)
	title.Rotation = math.Pi / 2
	all.FillText(title, vg.Point{X: inner.Min.X + small, Y: data.Center().Y}, s.y)
	s.drawLegend(draw.Crop(inner, 0, 0, 0, below-margin/2-(inner.Max.Y-inner.Min.Y)), rows)
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, fmt.Errorf("write SVG: %w", err)
	}
	// Generic fonts follow fonts that few machines have.
	return []byte(anchor(strings.ReplaceAll(b.String(), "font-family:Liberation Sans", "font-family:Liberation Sans,Arial,Helvetica,sans-serif"))), nil
}

// label sets the room for labels on the axes of figures.
func (s *sheet) label(area draw.Canvas) {
	size := s.DataCanvas(area).Size()
	if d, is := s.X.Tick.Marker.(decades); is {
		d.length, d.each = size.X, 3*small
		s.X.Tick.Marker = d
	}
	if d, is := s.Y.Tick.Marker.(decades); is {
		d.length, d.each = size.Y, 1.3*small
		s.Y.Tick.Marker = d
	}
}

// drawLegend draws the legend in two columns.
func (s *sheet) drawLegend(c draw.Canvas, rows int) {
	const thumb = 34
	for i, e := range s.legend {
		left := c.Min.X + line + vg.Length(i/rows)*(c.Max.X-c.Min.X)/2
		middle := c.Max.Y - (vg.Length(i%rows)+0.5)*line
		icon := draw.Canvas{Canvas: c.Canvas, Rectangle: vg.Rectangle{
			Min: vg.Point{X: left, Y: middle - line/2}, Max: vg.Point{X: left + thumb, Y: middle + line/2},
		}}
		for _, t := range e.thumbs {
			t.Thumbnail(&icon)
		}
		c.FillText(newText(small, draw.XLeft), vg.Point{X: left + thumb + small, Y: middle - small/3}, e.name)
	}
}
