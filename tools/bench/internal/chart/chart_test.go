// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
)

// TestPlotsSayWhatTheyShow checks that names, axes, units, scales and counts are in the image.
func TestPlotsSayWhatTheyShow(t *testing.T) {
	texts := textsOf(t, someLines(t))
	for text, anchor := range map[string]string{
		"a title": "middle", "prefixes (logarithmic, but for 0)": "middle", "ms (logarithmic; bars: quartiles)": "middle", "0": "middle", "10,000": "middle",
		"2": "end", "5": "end", "ip-masq, nftables": "", "another": "",
	} {
		wantText(t, texts, text, anchor)
	}
	texts = textsOf(t, someRatios(t))
	for text, anchor := range map[string]string{"a title": "middle", "× b (logarithmic; red: the budget)": "middle", "a": "end", "c": "end", "1": "middle"} {
		wantText(t, texts, text, anchor)
	}
}

func someLines(t *testing.T) []byte {
	t.Helper()
	svg, err := Lines("a title", "prefixes", "ms", []Line{
		{"ip-masq, nftables", []Point{{0, measure.Series{1, 2, 3}}, {4, measure.Series{1, 2, 3}}, {10_000, measure.Series{2, 2, 2}}}},
		{"`another`", []Point{{0, measure.Series{5}}, {64, nil}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return svg
}

func someRatios(t *testing.T) []byte {
	t.Helper()
	svg, err := Ratios("a title", "× b", []Row{{"`a`", measure.Estimate{Median: 2, Low: 1.5, High: 3, N: 9}, 2.5}, {"c", measure.Estimate{Median: 1, Low: 1, High: 1, N: 9}, 0}})
	if err != nil {
		t.Fatal(err)
	}
	return svg
}

// textsOf returns the texts of an image with their anchors. Each must have a generic font.
func textsOf(t *testing.T, svg []byte) map[string]string {
	t.Helper()
	texts := map[string]string{}
	for d := xml.NewDecoder(strings.NewReader(string(svg))); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return texts
		}
		if err != nil {
			t.Fatal(err)
		}
		start, is := token.(xml.StartElement)
		if !is || start.Name.Local != "text" {
			continue
		}
		var text struct {
			Anchor string `xml:"text-anchor,attr"`
			Style  string `xml:"style,attr"`
			Text   string `xml:",chardata"`
		}
		if err := d.DecodeElement(&text, &start); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(text.Style, ",sans-serif") {
			t.Errorf("%q has the fonts %s only", text.Text, text.Style)
		}
		texts[text.Text] = text.Anchor
	}
}

func wantText(t *testing.T, texts map[string]string, text, anchor string) {
	t.Helper()
	if got, there := texts[text]; !there || got != anchor {
		t.Errorf("%q is in the picture: %t, anchored %q, want %q; there are %q", text, there, got, anchor, texts)
	}
}

// TestPaper checks that the background is white.
func TestPaper(t *testing.T) {
	for _, svg := range [][]byte{someLines(t), someRatios(t)} {
		var picture struct {
			ViewBox string `xml:"viewBox,attr"`
			Group   struct {
				Paths []struct {
					D     string `xml:"d,attr"`
					Style string `xml:"style,attr"`
				} `xml:"path"`
			} `xml:"g"`
		}
		if err := xml.Unmarshal(svg, &picture); err != nil {
			t.Fatal(err)
		}
		size := strings.Fields(picture.ViewBox)
		w, h := size[2], size[3]
		first := picture.Group.Paths[0]
		if want := fmt.Sprintf("M0,0L%s,0L%s,%sL0,%sZ", w, w, h, h); first.D != want || first.Style != "fill:#FFFFFF" {
			t.Errorf("the paper is %s (%s), want %s", first.D, first.Style, want)
		}
	}
}

func TestNothingToDraw(t *testing.T) {
	if _, err := Lines("a title", "x", "y", nil); err == nil {
		t.Error("a plot without figures is drawn")
	}
	if _, err := Ratios("a title", "x", nil); err == nil {
		t.Error("a plot without rows is drawn")
	}
	if _, err := Lines("a title", "x", "y", []Line{{"a", []Point{{1, measure.Series{0}}}}}); err == nil {
		t.Error("0 is drawn on a logarithmic axis")
	}
	if _, err := Ratios("a title", "x", []Row{{Name: "a"}}); err == nil {
		t.Error("a ratio of 0 is drawn on a logarithmic axis")
	}
}

// names returns the names of plots: add.svg, connections.svg, add-64.svg and burst.svg,
// rebuild.svg, and unknown ones.
func names() map[string][]string {
	const after, rules = ", after another program's commit", ", 5,000 rules"
	forms := []string{"nftables", "iptables-nft", "iptables-legacy"}
	add := []string{"an empty plugin", "the legacy table, read only", "`iptables -S`, nft", "`iptables -S`, legacy", "go-iptables, nft", "go-iptables, legacy"}
	connections := []string{"no list, nftables"}
	rebuild := []string{"in process, nftables", "nft -f, nftables"}
	for i, f := range forms {
		add, connections, rebuild = append(add, "ip-masq, "+f), append(connections, "ip-masq, "+f), append(rebuild, "ADD, "+f)
		if i > 0 {
			connections, rebuild = append(connections, "the agents' chain, "+f), append(rebuild, "iptables-restore, "+f)
		}
	}
	all := slices.Clone(add)
	for _, name := range add {
		all = append(all, name+rules)
	}
	before := []string{"ip-masq, nftables" + after, "ip-masq, iptables-nft" + after}
	drawn := append(slices.Clone(add), before...)
	all = append(all, before...)
	all = append(all, before[0]+rules, before[1]+rules, "an empty plugin, again")
	var protocols []string
	for _, name := range connections {
		for _, suffix := range []string{", udp, no match", ", tcp, no match", ", udp, match first", ", udp, match last"} {
			protocols = append(protocols, name+suffix)
		}
	}
	unknown := []string{"no list"}
	for i := range 12 {
		unknown = append(unknown, fmt.Sprintf("number %d", i), fmt.Sprintf("number %d, again", i))
	}
	return map[string][]string{
		"add": drawn, "connections": connections, "ratios": all, "rebuild": rebuild, "protocols": protocols,
		"unknown": append(unknown, connections...),
	}
}

// TestNoTwoLookAlike checks that lines of a plot differ by dashes, or by colours and shapes.
func TestNoTwoLookAlike(t *testing.T) {
	for plot, names := range names() {
		styles := stylesOf(names)
		for i, a := range styles {
			for j, b := range styles[:i] {
				if !slices.Equal(a.dashes, b.dashes) {
					continue
				}
				far := distance(a, b)
				if far < 60 || far < 110 && a.shape == b.shape {
					t.Errorf("%s: %s and %s look alike: %v, %v (%.0f apart)", plot, names[i], names[j], a, b, far)
				}
			}
		}
	}
}

func distance(a, b style) float64 {
	square := func(x, y uint8) float64 { d := float64(x) - float64(y); return d * d }
	return math.Sqrt(square(a.color.R, b.color.R) + square(a.color.G, b.color.G) + square(a.color.B, b.color.B))
}

// TestSameEverywhere checks that a contender has the same colour and shape in every plot, and that
// a suffix changes the dashes.
func TestSameEverywhere(t *testing.T) {
	here := stylesOf([]string{"ip-masq, nftables", "ip-masq, nftables, after another program's commit", "`iptables -S`, legacy, 5,000 rules"})
	there := stylesOf([]string{"another", "iptables -S, legacy", "ADD, nftables", "ip-masq, nftables, udp, no match"})
	for _, pair := range [][2]style{{here[0], here[1]}, {here[0], there[2]}, {here[0], there[3]}, {here[2], there[1]}} {
		if pair[0].color != pair[1].color || pair[0].shape != pair[1].shape {
			t.Errorf("one contender looks like %v and like %v", pair[0], pair[1])
		}
	}
	if here[0].dashes != nil || here[1].dashes == nil {
		t.Errorf("dashes of a line: %v; of what has come before: %v", here[0].dashes, here[1].dashes)
	}
}

// TestZero checks that 0 is left of the first count, within the axis.
func TestZero(t *testing.T) {
	for _, cs := range []counts{{0}, {0, 1}, {0, 4, 64, 100_000}, {4, 64}, {7}} {
		low, high := cs.limits()
		at := low
		for _, c := range cs {
			place := cs.place(c)
			if place <= at || place >= high {
				t.Errorf("%v: %d stands at %g, after %g on an axis from %g to %g", cs, c, place, at, low, high)
			}
			at = place
		}
		if len(cs) > 1 && cs[0] == 0 {
			if share := math.Log(cs.place(cs[1])/cs.place(0)) / math.Log(high/low); share < 0.08 {
				t.Errorf("%v: 0 is %.2f of the axis from the next", cs, share)
			}
		}
	}
}

func TestTicks(t *testing.T) {
	for _, c := range []struct {
		d         decades
		low, high float64
		want      string
	}{
		{decades{250, 12}, 3, 250, "5 10 20 50 100 200"},
		{decades{250, 12}, 0.3, 20, "0.5 1 2 5 10 20"},
		{decades{250, 12}, 9, 120, "10 20 50 100"},
		{decades{250, 12}, 1e-3, 1e6, "0.001 0.01 0.1 1 10 100 1,000 10,000 100,000 1,000,000"},
		{decades{300, 27}, 0.9, 1.4, "0.9 1 1.1 1.2 1.3"},
		{decades{10, 27}, 0.9, 1.4, "1"},
	} {
		var labels []string
		for _, tick := range c.d.Ticks(c.low, c.high) {
			if !tick.IsMinor() {
				labels = append(labels, tick.Label)
			}
		}
		if d := cmp.Diff(c.want, strings.Join(labels, " ")); d != "" {
			t.Errorf("from %g to %g (-want +got):\n%s", c.low, c.high, d)
		}
	}
}

func TestThousands(t *testing.T) {
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"} {
		if got := Thousands(n); got != want {
			t.Errorf("%d is written %s, want %s", n, got, want)
		}
	}
}
