// SPDX-License-Identifier: Apache-2.0

package policy

import "fmt"

// Place is where a value of a source is written.
type Place struct {
	File  string
	Index int // of the item in its list there; -1 for a scalar
}

// String writes /etc/config/ip-masq-agent[2], and the file alone for a scalar.
func (p Place) String() string {
	if p.Index < 0 {
		return p.File
	}
	return fmt.Sprintf("%s[%d]", p.File, p.Index)
}

// Span is a run of items of one key that follow each other in one file too. A
// scalar is a run of one, whose First is -1.
type Span struct {
	File  string `json:"file"`
	First int    `json:"first"`
	Count int    `json:"count"`
}

// Places tells of a source that is made of several files in which of them each
// value stands: by key, the runs that make up its list, in their order.
type Places map[string][]Span

// Note adds the place of the next item of a key.
func (p Places) Note(key, file string, index int) {
	spans := p[key]
	if n := len(spans); n > 0 && index >= 0 {
		if last := &spans[n-1]; last.File == file && last.First+last.Count == index {
			last.Count++
			return
		}
	}
	p[key] = append(spans, Span{file, index, 1})
}

// Of returns the place of an item of a key, or of a scalar (index -1).
func (p Places) Of(key string, index int) (Place, bool) {
	at := max(index, 0)
	for _, s := range p[key] {
		if at < s.Count {
			if index < 0 {
				return Place{s.File, -1}, true
			}
			return Place{s.File, s.First + at}, true
		}
		at -= s.Count
	}
	return Place{}, false
}
