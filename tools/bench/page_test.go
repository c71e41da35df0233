// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/documents"
)

func readFile(t *testing.T, path string) string {
	t.Helper()
	return string(assert.Must(os.ReadFile(path))(t))
}

// TestPage runs the commands of docs/benchmarks/README.md on the results of a quick and partial `make bench`. The page's
// table has every benchmark, and no other.
func TestPage(t *testing.T) {
	page, out := readFile(t, "../../docs/benchmarks/README.md"), t.TempDir()
	results := filepath.Join(out, "results.txt")
	compared := 0
	for _, b := range documents.Blocks(page) {
		commands := regexp.MustCompile(`\.\./\.\./bin/bench/\w+\.txt`).ReplaceAllString(b.Commands, results)
		c := exec.Command("bash", "-ec", commands)
		c.Dir = "../.."
		c.Env = append(os.Environ(), "MAKEFLAGS=", "BENCHFLAGS=-quick -only add,connections,guard -out "+out)
		comparisons := strings.Count(b.Commands, "-filter")
		compared += comparisons
		if text, err := c.CombinedOutput(); err != nil || strings.Count(string(text), "vs base") < comparisons {
			t.Errorf("line %d: %v\n%s\nprinted\n%s\nwant a comparison of each -filter", b.Line, err, commands, text)
		}
	}
	if compared != 5 {
		t.Errorf("the page has %d comparisons, want 5", compared)
	}
	documented, written := map[string]bool{}, map[string]bool{}
	_, table, _ := strings.Cut(page, "| benchmark |")
	for _, row := range regexp.MustCompile(`(?m)^\| (`+"`"+`\w+.*?) \|`).FindAllStringSubmatch(table, -1) {
		for name := range strings.SplitSeq(row[1], ", ") {
			documented[strings.Trim(name, "`")] = true
		}
	}
	files, _ := filepath.Glob("*.go")
	for _, file := range files {
		for _, name := range regexp.MustCompile(`"([A-Z]\w+)/\w+=`).FindAllStringSubmatch(readFile(t, file), -1) {
			written[name[1]] = true
		}
	}
	assert.Equal(t, "benchmarks of the page", documented, written)
	for _, line := range regexp.MustCompile(`(?m)^Benchmark(\w+)/`).FindAllStringSubmatch(readFile(t, results), -1) {
		if !written[line[1]] {
			t.Errorf("the results have %s, which no row of the page is about", line[1])
		}
	}
}
