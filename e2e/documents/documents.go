// SPDX-License-Identifier: Apache-2.0

// Package documents reads the commands that documents tell a reader to run, for the tests that run them.
package documents

import (
	"regexp"
	"strings"
)

// Block is a fence of a document with commands.
type Block struct {
	Line int // of the document
	// Before has commands that a comment above the fence names: they prepare the node for a test.
	Before string
	// Output is in the next fence of the section, or in the same fence after a prompt.
	Commands, Output string
}

var fence = regexp.MustCompile("(?ms)^(?: *<!-- before: (.*?) -->\n)?( *)```(sh|console|text)\n(.*?)^ *```$|^#+ ")

// Blocks returns the blocks of a document.
func Blocks(text string) []Block {
	var all []Block
	open := false // the last block has no output yet
	for _, at := range fence.FindAllStringSubmatchIndex(text, -1) {
		group := func(i int) string {
			if at[2*i] < 0 {
				return ""
			}
			return text[at[2*i]:at[2*i+1]]
		}
		body := regexp.MustCompile("(?m)^"+group(2)).ReplaceAllString(group(4), "")
		b := Block{Line: 1 + strings.Count(text[:at[0]], "\n"), Before: group(1)}
		switch prompt, isPrompt := strings.CutPrefix(body, "$ "); {
		case group(3) == "sh":
			b.Commands = body
			all, open = append(all, b), true
		case isPrompt:
			b.Commands, b.Output, _ = strings.Cut(prompt, "\n")
			b.Commands += " || true"
			all, open = append(all, b), false
		case open && group(3) != "":
			all[len(all)-1].Output, open = body, false
		default:
			open = false
		}
	}
	return all
}
