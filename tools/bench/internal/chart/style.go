// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"image/color"
	"strings"

	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// style is the appearance of a contender.
type style struct {
	color  color.RGBA
	shape  draw.GlyphDrawer
	width  vg.Length
	dashes []vg.Length
}

func budgetColor() color.Color { return rgb(200, 30, 30) }

func rgb(r, g, b uint8) color.RGBA { return color.RGBA{r, g, b, 255} }

// contender is a known contender with its other names.
type contender struct {
	color color.RGBA
	shape draw.GlyphDrawer
	names []string
}

// ipMasq is the prefix of the names of ip-masq, whose lines are thicker.
const ipMasq = "ip-masq"

// known returns the contenders of the benchmark.
func known() []contender {
	return []contender{
		{rgb(0, 114, 178), polygon{circle, false, false}, []string{"ip-masq, nftables", "ADD, nftables"}},
		{rgb(213, 94, 0), polygon{square, false, false}, []string{"ip-masq, iptables-nft", "ADD, iptables-nft"}},
		{rgb(0, 158, 115), polygon{triangle, false, false}, []string{"ip-masq, iptables-legacy", "ADD, iptables-legacy"}},
		{rgb(140, 140, 140), polygon{circle, false, true}, []string{"an empty plugin"}},
		{rgb(225, 110, 180), polygon{triangle, true, false}, []string{"iptables -S, nft"}},
		{rgb(125, 20, 110), polygon{triangle, true, true}, []string{"iptables -S, legacy"}},
		{rgb(215, 165, 0), polygon{square, true, false}, []string{"go-iptables, nft"}},
		{rgb(120, 75, 30), polygon{square, true, true}, []string{"go-iptables, legacy"}},
		{rgb(0, 0, 0), strokes{true}, []string{"the legacy table, read only"}},
		{rgb(120, 90, 225), polygon{square, false, true}, []string{"the agents' chain, iptables-nft", "the agents' restore, iptables-nft", "iptables-restore, iptables-nft"}},
		{rgb(150, 20, 50), polygon{triangle, false, true}, []string{"the agents' chain, iptables-legacy", "the agents' restore, iptables-legacy", "iptables-restore, iptables-legacy"}},
		{rgb(75, 75, 75), polygon{circle, false, true}, []string{"no list, nftables", "no list"}},
		{rgb(70, 185, 240), polygon{square, true, false}, []string{"in process, nftables"}},
		{rgb(60, 65, 120), strokes{true}, []string{"nft -f, nftables"}},
	}
}

// otherStyles returns the appearances of unknown contenders.
func otherStyles() []contender {
	return []contender{
		{rgb(140, 155, 20), strokes{false}, nil},
		{rgb(240, 130, 130), polygon{circle, false, true}, nil},
		{rgb(0, 95, 95), strokes{true}, nil},
		{rgb(175, 150, 205), polygon{square, false, false}, nil},
	}
}

// stylesOf returns the styles of a plot's contenders. Known contenders look the same in every plot,
// others depend on their rank. A suffix after a comma changes the dashes. No two names look the
// same.
func stylesOf(names []string) []style {
	type appearance struct{ index, dashes int }
	taken := map[appearance]bool{}
	ranks := map[string]int{}
	all := make([]style, len(names))
	for i, name := range names {
		index, suffix := identify(plain(name))
		if index < 0 {
			base, _, _ := strings.Cut(plain(name), ", ")
			if _, met := ranks[base]; !met {
				ranks[base] = len(ranks)
			}
			index, suffix = len(known())+ranks[base]%len(otherStyles()), strings.TrimPrefix(plain(name), base)
		}
		of := appearance{index, usualDashes(suffix)}
		for taken[of] {
			of.dashes++
		}
		taken[of] = true
		c := append(known(), otherStyles()...)[index]
		all[i] = style{c.color, c.shape, vg.Points(1.3), dashes(of.dashes)}
		if strings.HasPrefix(name, ipMasq) {
			all[i].width = vg.Points(2.1)
		}
	}
	return all
}

// identify returns the index of the known contender with the name, and the suffix; -1 if there is
// none.
func identify(name string) (index int, suffix string) {
	index = -1
	longest := 0
	for i, c := range known() {
		for _, n := range c.names {
			after, found := strings.CutPrefix(name, n)
			if found && len(n) > longest && (after == "" || strings.HasPrefix(after, ", ")) {
				index, suffix, longest = i, after, len(n)
			}
		}
	}
	return index, suffix
}

// usualDashes returns the index of the dashes of a suffix.
func usualDashes(suffix string) int {
	switch {
	case suffix == "":
		return 0
	case strings.HasPrefix(suffix, ", after"):
		return 1
	case strings.HasSuffix(suffix, " rules"):
		return 2
	}
	return 3
}

// dashes returns pattern n: none, dashes, dots, and then dashes with more and more dots between.
func dashes(n int) []vg.Length {
	switch n {
	case 0:
		return nil
	case 1:
		return []vg.Length{5, 3}
	case 2:
		return []vg.Length{1.5, 2}
	}
	pattern := []vg.Length{7, 2}
	for range n - 2 {
		pattern = append(pattern, 1.5, 2)
	}
	return pattern
}
