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
		l := Line{Name: fmt.Sprint("contender ", i)}
		l.Add(4, []float64{1, 3, 2}, 1)
		l.Add(10_000, []float64{10, float64(20 + i), 50}, 1)
		lines = append(lines, l)
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
	for _, want := range []string{">Time of an ADD<", ">prefixes (logarithmic)<", ">ms (logarithmic)<", ">4<", ">10000<", ">contender 10<"} {
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
