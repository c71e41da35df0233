// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// terminalWidth returns the number of columns of the terminal that a file is, or 0 if it is none.
func terminalWidth(f *os.File) int {
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return int(size.Col)
}

// wrapped breaks the lines of a text at spaces, so that they fit into the width. Longer words stay whole.
// Continuation lines are indented as the text of the line behind its dash, at least by hanging.
func wrapped(text string, width, hanging int) string {
	const least = 40 // a narrower terminal breaks the lines itself, and 0 is no terminal
	if width < least {
		return text
	}
	var b strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		indent := max(len(line)-len(strings.TrimLeft(line, " -")), hanging)
		row := ""
		for i, word := range strings.Split(line, " ") {
			longer := row + " " + word
			switch {
			case i == 0:
				row = word
			case word != "" && utf8.RuneCountInString(row) > indent && utf8.RuneCountInString(longer) > width:
				b.WriteString(strings.TrimRight(row, " ") + "\n")
				row = strings.Repeat(" ", indent) + word
			default:
				row = longer
			}
		}
		b.WriteString(row + "\n")
	}
	return b.String()
}
