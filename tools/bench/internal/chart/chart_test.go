// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func someLines() (lines []Line) {
	for i := range 11 {
		lines = append(lines, Line{fmt.Sprint("contender ", i), []int{4, 10_000}, [][]float64{{1, 2, 3}, {10, 20, float64(30 + i)}}})
	}
	return lines
}

// TestLines checks that a picture names its axes, counts and contenders, and that no two of these look
// the same. With CHART_DIR=DIR it leaves the picture there.
func TestLines(t *testing.T) {
	svg, err := Lines("Time of an ADD", "prefixes", "ms", someLines())
	if err != nil {
		t.Fatal(err)
	}
	if dir := os.Getenv("CHART_DIR"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, "lines.svg"), svg, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text := string(svg)
	for _, want := range []string{">Time of an ADD<", ">prefixes (logarithmic)<", ">ms (logarithmic; bars: quartiles)<", ">4<", ">10000<", ">contender 10<"} {
		if !strings.Contains(text, want) {
			t.Errorf("no text %s", want)
		}
	}
	// The legend has a glyph of each contender right before its name.
	seen := map[string]string{}
	for _, l := range someLines() {
		before, _, _ := strings.Cut(text, ">"+l.Name+"<")
		glyph, _, _ := strings.Cut(before[strings.LastIndex(before, "<path"):], "/>")
		glyph = regexp.MustCompile(`-?[0-9.]+,-?[0-9.]+`).ReplaceAllString(glyph, "")
		if other := seen[glyph]; other != "" {
			t.Errorf("%s and %s look the same: %s", other, l.Name, glyph)
		}
		seen[glyph] = l.Name
	}
}
