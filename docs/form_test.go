// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// What vale, which `make lint` runs, does not check: it knows no columns, and gives neither fences nor tables.
const (
	maxColumns = 100
	maxCell    = 120
)

var (
	fence     = regexp.MustCompile("^ *```(.*)$")
	separator = regexp.MustCompile(`^\|([ :-]+\|)+$`)
	// A heading and an image cannot be wrapped.
	unwrapped = regexp.MustCompile(`^(#|!\[)`)
)

// TestForm: lines have at most 100 columns, fences have a language, and tables have headers and short
// cells. A fence may have long lines, as it has commands and output.
func TestForm(t *testing.T) {
	for path, text := range documents(t) {
		if strings.HasSuffix(path, ".yml") {
			continue
		}
		inFence, previous := false, ""
		for i, line := range strings.Split(text, "\n") {
			fail := func(format string, arguments ...any) {
				t.Helper()
				t.Errorf("%s:%d: "+format, append([]any{path, i + 1}, arguments...)...)
			}
			language := fence.FindStringSubmatch(line)
			switch {
			case language != nil:
				inFence = !inFence
				// The manual page has no use for a language.
				if inFence && language[1] == "" && !strings.HasSuffix(path, ".8.md") {
					fail("the fence has no language: sh, console, json, text, …")
				}
			case inFence:
			case strings.HasPrefix(line, "|"):
				for _, cell := range cells(line) {
					if n := utf8.RuneCountInString(cell); n > maxCell {
						fail("the cell has %d characters, the limit is %d: move the text below the table: %s", n, maxCell, cell)
					}
				}
				if separator.MatchString(line) {
					for _, header := range cells(previous) {
						if header == "" {
							fail("the table has a column without a header: %s", previous)
						}
					}
				}
			case utf8.RuneCountInString(line) > maxColumns && !unwrapped.MatchString(line):
				fail("the line has %d columns, the limit is %d", utf8.RuneCountInString(line), maxColumns)
			}
			previous = line
		}
		if inFence {
			t.Errorf("%s: the last fence does not end", path)
		}
	}
}

// cells returns the texts of the cells in a row of a table.
func cells(row string) []string {
	all := strings.Split(strings.Trim(strings.ReplaceAll(row, `\|`, "¦"), "|"), "|")
	for i := range all {
		all[i] = strings.TrimSpace(all[i])
	}
	return all
}

// TestMessages: a message that begins an item, a row or a heading of troubleshooting.md or reconciler.md is in a
// string of the code, between its verbs. In the document, … is in place of these.
func TestMessages(t *testing.T) {
	var code strings.Builder
	for _, pattern := range []string{"pkg/*/*.go", "pkg/*/*/*.go", "plugin/*.go", "reconciler/*.go"} {
		files, _ := filepath.Glob(filepath.Join(root, pattern))
		for _, file := range files {
			if !strings.HasSuffix(file, "_test.go") {
				code.WriteString(read(t, strings.TrimPrefix(file, root)))
			}
		}
	}
	notInStrings := regexp.MustCompile(`(?m)^\s*//.*$|" \+\s+"`) // comments, and where a string is broken
	all := strings.ReplaceAll(notInStrings.ReplaceAllString(code.String(), ""), `\"`, `"`)
	messages := names("(?m)^ *(?:-|\\||#+) `([^`\n]* [^`\n]*)`", read(t, "docs", "troubleshooting.md")+read(t, "docs", "reconciler.md"))
	if len(messages) < 30 {
		t.Errorf("found the messages %q", messages)
	}
	for _, message := range messages {
		for part := range strings.SplitSeq(message, "…") {
			if part = strings.TrimSpace(part); !strings.Contains(all, part) {
				t.Errorf("the documents have the message\n%s\nand no string of the code has %q", message, part)
			}
		}
	}
}
