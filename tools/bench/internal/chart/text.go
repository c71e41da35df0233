// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// Marks of a text that is to end or to have its middle where it is put. The canvas
// knows only texts that begin there: it takes the mark for a letter, and anchor
// makes an attribute of it. They are of Unicode's private use.
const (
	endMark    = "\ue000"
	middleMark = "\ue001"
)

// anchor makes attributes of the marks.
func anchor(svg string) string {
	return strings.NewReplacer(
		">"+endMark, ` text-anchor="end">`,
		">"+middleMark, ` text-anchor="middle">`,
	).Replace(svg)
}

// anchored are texts that the reader's program aligns, who knows the width of
// its font, not we.
type anchored struct{ text.Handler }

// newText is a style of text of the size.
func newText(size vg.Length, x text.XAlignment) text.Style {
	return text.Style{
		Font:    font.Font{Typeface: plot.DefaultFont.Typeface, Variant: "Sans", Size: size},
		XAlign:  x,
		YAlign:  draw.YBottom,
		Handler: anchored{plot.DefaultTextHandler},
	}
}

// Box implements text.Handler: the room of a text, in fonts that are a quarter
// wider than Liberation Sans too, as DejaVu Sans and Verdana are.
func (a anchored) Box(txt string, f font.Font) (width, height, depth vg.Length) {
	width, height, depth = a.Handler.Box(txt, f)
	return 1.25 * width, height, depth
}

// Draw implements text.Handler.
func (a anchored) Draw(c vg.Canvas, txt string, style text.Style, at vg.Point) {
	mark := ""
	switch style.XAlign {
	case draw.XCenter:
		mark = middleMark
	case draw.XRight:
		mark = endMark
	}
	style.XAlign = draw.XLeft
	a.Handler.Draw(c, mark+txt, style, at)
}

// plain is a name without the marks of Markdown.
func plain(name string) string { return strings.ReplaceAll(name, "`", "") }

// Thousands writes 10,000.
func Thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
