// SPDX-License-Identifier: Apache-2.0

package document

import "fmt"

// Decoder reads the first document of a text. Its errors are of type Error.
type Decoder func(text []byte) (Document, error)

// Document is what a text holds.
type Document struct {
	JSON []byte // its value; of keys that come twice the last
	Keys []Key  // of a mapping, nil for anything else, with those that come twice
	Line int    // where the value begins
	More bool   // other documents follow, which say something
}

// Key is where a key stands.
type Key struct {
	Name  string
	Line  int
	Items []int // the lines of the items of a list
}

// Error is why a text cannot be read. What it repeats of the text is as it
// stands there, of any length.
type Error struct {
	Line    int    // 0 where it is not known
	Subject string // what the problem is about; it may be ""
	Problem string
}

// Error writes line 7: <<: merges are not read; write out the keys.
func (e *Error) Error() string {
	text := e.Problem
	if e.Subject != "" {
		text = e.Subject + ": " + text
	}
	if e.Line > 0 {
		return fmt.Sprintf("line %d: %s", e.Line, text)
	}
	return text
}
