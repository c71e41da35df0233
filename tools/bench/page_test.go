// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
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

// TestPage runs the commands of docs/benchmarks/README.md; `make bench` only a part. The page's table has every
// benchmark of the results and no other.
func TestPage(t *testing.T) {
	page, results := readFile(t, "../../docs/benchmarks/README.md"), readFile(t, "../../docs/benchmarks/results.txt")
	measured, out := map[string]bool{}, t.TempDir()
	compared := 0
	for _, b := range documents.Blocks(page) {
		c := exec.Command("bash", "-ec", b.Commands)
		c.Dir = "../.."
		c.Env = append(os.Environ(), "MAKEFLAGS=", "BENCHFLAGS=-quick -only guard -out "+out)
		comparisons := strings.Count(b.Commands, "-filter")
		compared += comparisons
		if text, err := c.CombinedOutput(); err != nil || strings.Count(string(text), "vs base") < comparisons {
			t.Errorf("line %d: %v\n%s\nprinted\n%s\nwant a comparison of each -filter", b.Line, err, b.Commands, text)
		}
	}
	if ran := readFile(t, filepath.Join(out, "results.txt")); !strings.Contains(ran, "BenchmarkGuard/") || compared < 4 {
		t.Errorf("%d comparisons; make bench wrote\n%s", compared, ran)
	}
	documented := map[string]bool{}
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
