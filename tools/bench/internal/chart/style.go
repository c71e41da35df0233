// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"fmt"
	"image/color"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

const sans = "Sans"

func newPlot(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Title.Padding = vg.Points(6)
	p.X.Padding, p.Y.Padding = vg.Points(4), vg.Points(4)
	for _, text := range []*font.Font{
		&p.Title.TextStyle.Font, &p.X.Label.TextStyle.Font, &p.Y.Label.TextStyle.Font,
		&p.X.Tick.Label.Font, &p.Y.Tick.Label.Font, &p.Legend.TextStyle.Font,
	} {
		text.Variant, text.Size = sans, vg.Points(9)
	}
	p.Title.TextStyle.Font.Size = vg.Points(11)
	p.Legend.Top, p.Legend.Left = true, true
	p.Legend.Padding, p.Legend.ThumbnailWidth = vg.Points(2), vg.Points(24)
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.Gray{225}, color.Gray{225}
	p.Add(grid)
	return p
}

// render writes the plot. Names of fonts that few machines have are followed by
// those that all do.
func render(p *plot.Plot, width, height vg.Length) ([]byte, error) {
	canvas := vgsvg.New(width, height)
	// Where the fonts are others than those that are measured here, text is wider.
	const margin = 0.45 * vg.Centimeter
	p.Draw(draw.Crop(draw.NewCanvas(canvas, width, height), margin, -margin, margin/2, -margin/2))
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, fmt.Errorf("write SVG: %w", err)
	}
	return []byte(strings.ReplaceAll(b.String(), "font-family:Liberation Sans", "font-family:Liberation Sans,Arial,Helvetica,sans-serif")), nil
}

type style struct {
	color  color.Color
	shape  draw.GlyphDrawer
	dashes []vg.Length
}

func budgetColor() color.Color { return color.RGBA{200, 30, 30, 255} }

// ranks number contenders by the first of which the name begins as theirs does:
// who is drawn twice, in two places, is drawn alike.
func ranks(names []string) []int {
	all := make([]int, len(names))
	for i := range names {
		all[i] = slices.IndexFunc(names, func(n string) bool { return strings.HasPrefix(names[i], n) })
	}
	return all
}

// styleOf is how a contender is drawn: ours by the form, in the same colour
// everywhere, dashed where something came before; others by their rank in what
// is left, dashed too.
func styleOf(name string, i int) style {
	dashes := []vg.Length{vg.Points(4), vg.Points(2)}
	ours := []struct {
		name  string
		style style
	}{
		{"ip-masq, nftables", style{color.RGBA{0, 114, 178, 255}, draw.CircleGlyph{}, nil}},
		{"ip-masq, iptables-nft", style{color.RGBA{213, 94, 0, 255}, draw.BoxGlyph{}, nil}},
		{"ip-masq, iptables-legacy", style{color.RGBA{0, 158, 115, 255}, draw.PyramidGlyph{}, nil}},
	}
	for _, o := range ours {
		if after, found := strings.CutPrefix(name, o.name); found {
			if strings.HasPrefix(after, ", after") {
				o.style.dashes = dashes
			}
			return o.style
		}
	}
	others := []style{
		{color.Gray{90}, draw.RingGlyph{}, dashes},
		{color.RGBA{204, 121, 167, 255}, draw.CrossGlyph{}, dashes},
		{color.RGBA{160, 120, 0, 255}, draw.PlusGlyph{}, dashes},
		{color.RGBA{86, 100, 233, 255}, draw.SquareGlyph{}, dashes},
		{color.RGBA{120, 60, 160, 255}, draw.TriangleGlyph{}, dashes},
		{color.RGBA{60, 150, 170, 255}, draw.CircleGlyph{}, dashes},
		{color.RGBA{150, 40, 60, 255}, draw.BoxGlyph{}, dashes},
		{color.RGBA{90, 140, 40, 255}, draw.PyramidGlyph{}, dashes},
	}
	return others[i%len(others)]
}
