// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

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
