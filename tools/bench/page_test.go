// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/documents"
)

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestPage runs the comparisons of docs/benchmarks/README.md. Its table has every benchmark of the
// results and no other.
func TestPage(t *testing.T) {
	page, results := readFile(t, "../../docs/benchmarks/README.md"), readFile(t, "../../docs/benchmarks/results.txt")
	ran := 0
	for _, b := range documents.Blocks(page) {
		if !strings.Contains(b.Commands, "benchstat") {
			continue
		}
		ran++
		c := exec.Command("bash", "-ec", b.Commands)
		c.Dir = "../.."
		if out, err := c.CombinedOutput(); err != nil || strings.Count(string(out), "vs base") < strings.Count(b.Commands, "-filter") {
			t.Errorf("line %d: %v\n%s\nprinted\n%s\nwant a comparison of each command", b.Line, err, b.Commands, out)
		}
	}
	if ran < 3 {
		t.Errorf("%d blocks with benchstat", ran)
	}
	documented, measured := map[string]bool{}, map[string]bool{}
	_, table, _ := strings.Cut(page, "| benchmark |")
	for _, row := range regexp.MustCompile(`(?m)^\| (`+"`"+`\w+.*?) \|`).FindAllStringSubmatch(table, -1) {
		for name := range strings.SplitSeq(row[1], ", ") {
			documented[strings.Trim(name, "`")] = true
		}
	}
	for _, line := range regexp.MustCompile(`(?m)^Benchmark(\w+)/`).FindAllStringSubmatch(results, -1) {
		measured[line[1]] = true
	}
	if diff := cmp.Diff(measured, documented); diff != "" {
		t.Errorf("benchmarks of results.txt (-) and of the page (+):\n%s", diff)
	}
}
