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

// Marks of centred and right-aligned texts. The canvas supports only left-aligned text, so the
// marks, from Unicode's private use area, are characters of the text that anchor replaces by an
// attribute.
const (
	endMark    = "\ue000"
	middleMark = "\ue001"
)

// anchor replaces the marks by attributes.
func anchor(svg string) string {
	return strings.NewReplacer(
		">"+endMark, ` text-anchor="end">`,
		">"+middleMark, ` text-anchor="middle">`,
	).Replace(svg)
}

// anchored texts are aligned by the program that displays them, which knows the width of its font.
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

// Box implements text.Handler. It reserves room for fonts a quarter wider than Liberation Sans,
// such as DejaVu Sans and Verdana.
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

// plain returns a name without Markdown.
func plain(name string) string { return strings.ReplaceAll(name, "`", "") }

// Thousands formats 10000 as 10,000.
func Thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
