// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
)

// TestPlotsSayWhatTheyShow: names, axes, units and counts are in the picture, and
// text has a font that every machine has.
func TestPlotsSayWhatTheyShow(t *testing.T) {
	lines, err := Lines("a title", "prefixes", "ms", []Line{
		{"ip-masq, nftables", []Point{{0, measure.Series{1, 2, 3}}, {10_000, measure.Series{2, 2, 2}}}},
		{"`another`", []Point{{0, measure.Series{5}}, {64, nil}}},
	})
	wantTexts(t, lines, err, "a title", "prefixes", "ms", "10,000", "ip-masq, nftables", ">another<")
	ratios, err := Ratios("a title", "× b", []Row{{"a", measure.Estimate{Median: 2, Low: 1.5, High: 3, N: 9}, 2.5}, {"c", measure.Estimate{Median: 1, Low: 1, High: 1, N: 9}, 0}})
	wantTexts(t, ratios, err, "a title", "× b (red: the budget)", ">a<", ">c<")
}

func wantTexts(t *testing.T, svg []byte, err error, texts ...string) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range append(texts, "sans-serif") {
		if !strings.Contains(string(svg), text) {
			t.Errorf("no %q in the picture", text)
		}
	}
}

func TestNothingToDraw(t *testing.T) {
	if _, err := Lines("a title", "x", "y", nil); err == nil {
		t.Error("a plot without figures is drawn")
	}
}

func TestRanks(t *testing.T) {
	if d := cmp.Diff([]int{0, 1, 0, 1}, ranks([]string{"a", "b", "a, again", "b, again"})); d != "" {
		t.Error(d)
	}
}

func TestThousands(t *testing.T) {
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"} {
		if got := Thousands(n); got != want {
			t.Errorf("%d is written %s, want %s", n, got, want)
		}
	}
}
