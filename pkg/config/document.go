// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ErrNotJSON reports text that is not JSON (RFC 8259): error code 6 of CNI, where a
// configuration that is JSON but wrong has 7 (CNI spec, section "Error").
var ErrNotJSON = errors.New("configuration is not JSON")

// Limits on the messages about one document.
const (
	MaxShown      = 8      // mistakes
	maxShownBytes = 4096   // of all mistakes
	maxValueBytes = 512    // of one value; policy.Quote shows less
	maxMistakes   = 10_000 // after which list items are not read
)

// DocumentError holds every mistake in one document, in its order.
type DocumentError struct{ Mistakes []error }

// Error writes the first mistakes on one line, followed by the number of the others.
func (e *DocumentError) Error() string {
	var b strings.Builder
	for i, mistake := range e.Mistakes {
		text := mistake.Error()
		if i == MaxShown || i > 0 && b.Len()+len(text) > maxShownBytes {
			fmt.Fprintf(&b, "; and %d more", len(e.Mistakes)-i)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(text)
	}
	return b.String()
}

// Unwrap returns the mistakes: policy.FieldErrors for those about a key.
func (e *DocumentError) Unwrap() []error { return e.Mistakes }

// Member is one key of a document with its value as JSON.
type Member struct {
	Key       string
	Value     json.RawMessage
	Err       error // why the value cannot be written as JSON
	Line      int   // 0 if unknown
	ItemLines []int // the lines of the items of a list, if known
}

// Key is a key that a document may have. Without a Value it is ignored.
type Key struct {
	Name string
	Value
	Placeholder string // of the value of the key's flag; "" for a boolean
	Usage       string // of the flag: one line
}

// Position is where a key and the items of its list stand.
type Position struct {
	Line      int   // 0 if unknown
	ItemLines []int // if known
	Indexes   []int // of the items that were kept: bad and repeated ones are dropped
}

// Document is a document while it is read. The maps are by key, with Table before it.
type Document struct {
	File  string // "" if the document is not a file
	Table string // "agent." while the policy in that table is validated

	Mistakes  []error
	Flawed    map[string]bool // keys with a mistake
	Positions map[string]Position
}

// Fail records a mistake. The index is -1 for a mistake that is not about a list item.
func (d *Document) Fail(key string, index int, value, problem string) {
	key = d.Table + key
	if d.Flawed == nil {
		d.Flawed = map[string]bool{}
	}
	d.Flawed[key] = true
	d.NoteAt(d.Line(key, index), &policy.FieldError{Key: key, Index: index, Value: value, Problem: problem})
}

// Line returns the line of a list item or, if that is unknown, of its key.
func (d *Document) Line(key string, index int) int {
	p := d.Positions[key]
	if index >= 0 && index < len(p.ItemLines) {
		return p.ItemLines[index]
	}
	return p.Line
}

// NoteAt records a mistake on a line.
func (d *Document) NoteAt(line int, mistake error) {
	d.Mistakes = append(d.Mistakes, d.Locate(line, mistake))
}

// Locate adds the file and the line to an error.
func (d *Document) Locate(line int, err error) error {
	switch {
	case d.File != "" && line > 0:
		return fmt.Errorf("%s:%d: %w", policy.Printable(d.File), line, err)
	case d.File != "":
		return fmt.Errorf("%s: %w", policy.Printable(d.File), err)
	}
	return err
}

// Err returns all mistakes as one DocumentError, or nil.
func (d *Document) Err() error {
	if len(d.Mistakes) == 0 {
		return nil
	}
	return &DocumentError{Mistakes: d.Mistakes}
}

// Read reads every member whose key is in the table. An unknown key and one that appears
// twice are mistakes.
func (d *Document) Read(members []Member, keys []Key) {
	known := make(map[string]Key, len(keys))
	for _, k := range keys {
		known[k.Name] = k
	}
	times := make(map[string]int, len(members))
	d.Positions = map[string]Position{}
	for _, m := range members {
		times[m.Key]++
		if m.Line > 0 {
			d.Positions[m.Key] = Position{Line: m.Line, ItemLines: m.ItemLines}
		}
		k, isKnown := known[m.Key]
		isKnown = isKnown || d.File == "" && isProtocolKey(m.Key)
		switch {
		case !isKnown && times[m.Key] == 1:
			d.Fail(m.Key, -1, "", d.unknown(m.Key, keys))
		case !isKnown || times[m.Key] > 2:
		case times[m.Key] == 2:
			d.Fail(m.Key, -1, "", "is there twice; write it once")
		case m.Err != nil:
			d.Fail(m.Key, -1, "", m.Err.Error())
		default:
			k.Read(d, m.Key, m.Value)
		}
	}
}

func (d *Document) unknown(name string, keys []Key) string {
	if len(d.Mistakes) >= MaxShown {
		return "is not a known key; remove it" // not shown: the search would be wasted
	}
	for _, k := range keys {
		if table, found := strings.CutSuffix(k.Name, "."+name); found {
			return "is a key of [" + table + "]; write it below that line"
		}
	}
	if near := Nearest(name, keys); near != "" {
		sameTable := name[:strings.LastIndexByte(name, '.')+1]
		return "is not a known key; did you mean " + strings.TrimPrefix(near, sameTable) + "?"
	}
	return "is not a known key; remove it"
}

// isProtocolKey reports whether the CNI spec reserves the key for the runtime.
func isProtocolKey(key string) bool { return strings.HasPrefix(key, "cni.dev/") }

// Nearest returns the known key that an unknown one most likely means, or "": the one with
// which it shares most letters at both ends, and three quarters at least; two letters that
// changed places count as one. It ignores letter case, '-' and '_'.
func Nearest(unknown string, keys []Key) string {
	fold := func(s string) string { return strings.NewReplacer("-", "", "_", "").Replace(strings.ToLower(s)) }
	best, bestShare, a := "", 0.0, fold(unknown)
	for _, k := range keys {
		b := fold(k.Name)
		same, most := 0, min(len(a), len(b))
		for same < most && a[same] == b[same] {
			same++
		}
		if i := same; i+1 < most && a[i] == b[i+1] && a[i+1] == b[i] {
			same++
		}
		for i := 1; same < most && a[len(a)-i] == b[len(b)-i]; i++ {
			same++
		}
		if share := float64(same) / float64(max(len(a), len(b))); share >= 0.75 && share > bestShare {
			best, bestShare = k.Name, share
		}
	}
	return best
}

// ValidatePolicy validates a policy after the document was read. It does not report the consequences of a mistake
// that is already reported.
func (d *Document) ValidatePolicy(s policy.SourcePolicy, limit int) {
	if d.Flawed[d.Table+"enableIPv6"] {
		s.EnableIPv6 = new(true)
	}
	if d.Flawed[d.Table+"cidrLimit"] {
		limit = math.MaxInt
	}
	var joined interface{ Unwrap() []error }
	if !errors.As(s.Validate(limit), &joined) {
		return
	}
	for _, err := range joined.Unwrap() {
		line := 0
		var mistake *policy.FieldError
		if errors.As(err, &mistake) {
			mistake.Key = d.Table + mistake.Key
			if kept := d.Positions[mistake.Key].Indexes; mistake.Index >= 0 && mistake.Index < len(kept) {
				mistake.Index = kept[mistake.Index]
			}
			line = d.Line(mistake.Key, mistake.Index)
		}
		d.NoteAt(line, err)
	}
}
