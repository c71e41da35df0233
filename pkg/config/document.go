// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ErrNotJSON reports text that is not JSON (RFC 8259). CNI has an error code of its own for
// it: 6, where a configuration that is JSON but wrong has 7 (CNI spec, section "Error").
var ErrNotJSON = errors.New("configuration is not JSON")

// Limits on the messages about one document.
const (
	MaxShown      = 8      // mistakes
	maxShownBytes = 4096   // of all mistakes
	maxValueBytes = 512    // of one value; policy.Quote shows less
	maxMistakes   = 10_000 // after which list items are not read
)

// DocumentError holds every mistake in one document, in the order of the document. Mistakes
// that are not about a single key come last.
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

	Spelled string // the key as written, if letter case does not matter
}

// Key is a key that a kind of document may have. A key without a Read function is accepted
// and not read.
type Key struct {
	Name string
	Value
	Usage string // of the key's flag: one line, the value's placeholder in backquotes
}

// Position is where a key and its items stand.
type Position struct {
	Line      int
	ItemLines []int
}

// Document is a document while it is read: where its keys stand, and its mistakes. The maps
// are by key, with Table before it.
type Document struct {
	File     string // "" if the document is not a file
	Settings string // the path of reconciler.toml, for the policy in its table [agent]
	Table    string // "agent." while the keys of that table are judged
	line     int    // of the key that is being read

	Mistakes []error
	Flawed   map[string]bool     // keys with a mistake
	Indexes  map[string][]int    // of each list: the indexes of the items that were kept
	Lines    map[string]Position // of the keys that were read
}

// Fail records a mistake. The index is -1 for a mistake that is not about a list item.
func (d *Document) Fail(key string, index int, value, problem string) {
	key = d.Table + key
	if d.Flawed == nil {
		d.Flawed = map[string]bool{}
	}
	d.Flawed[key] = true
	d.NoteAt(d.LineOf(key, index, d.line), &policy.FieldError{Key: key, Index: index, Value: value, Problem: problem})
}

// LineOf returns the line of a list item, or the given line if the lines of items are unknown.
func (d *Document) LineOf(key string, index, otherwise int) int {
	if items := d.Lines[key].ItemLines; index >= 0 && index < len(items) {
		return items[index]
	}
	return otherwise
}

// NoteAt records a mistake on a line.
func (d *Document) NoteAt(line int, mistake error) {
	d.Mistakes = append(d.Mistakes, d.Locate(line, mistake))
}

// Locate adds the file and the line to an error.
func (d *Document) Locate(line int, err error) error {
	switch {
	case d.Settings != "" && line > 0:
		return fmt.Errorf("%s:%d: agent.%w", policy.Printable(d.Settings), line, err)
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
	for _, m := range members {
		d.line = m.Line
		times[m.Key]++
		k, inTable := known[m.Key]
		isKnown := inTable || d.File == "" && isProtocolKey(m.Key)
		switch {
		case !isKnown && times[m.Key] == 1:
			d.Fail(m.Key, -1, "", d.unknown(m.Key, keys))
		case !isKnown || times[m.Key] > 2:
		case times[m.Key] == 2:
			problem := "is there twice; write it once"
			if m.Spelled != "" && m.Spelled != m.Key { // people search for what they wrote
				problem = "is there twice, as " + policy.Printable(m.Spelled) + "; write it once"
			}
			d.Fail(m.Key, -1, "", problem)
		case m.Err != nil:
			d.Fail(m.Key, -1, "", m.Err.Error())
		case k.Read != nil:
			if d.Lines == nil {
				d.Lines = map[string]Position{}
			}
			d.Lines[m.Key] = Position{m.Line, m.ItemLines}
			k.Read(d, m.Key, m.Value)
		}
	}
	d.line = 0
}

func (d *Document) unknown(name string, keys []Key) string {
	if name == "" {
		return "a key without a name is no key; remove it"
	}
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

// Nearest returns the known key that an unknown one most likely means, or "". It ignores
// letter case, '-' and '_', and accepts a quarter of the letters to be wrong.
func Nearest(unknown string, keys []Key) string {
	const longest = 64
	if len(unknown) > longest {
		return ""
	}
	fold := func(s string) string { return strings.NewReplacer("-", "", "_", "").Replace(strings.ToLower(s)) }
	folded := fold(unknown)
	best, bestDistance := "", longest
	for _, k := range keys {
		name := fold(k.Name)
		distance := editDistance(folded, name)
		if distance < bestDistance && distance <= max(1, len(name)/4) {
			best, bestDistance = k.Name, distance
		}
	}
	return best
}

// editDistance returns the Levenshtein distance of two texts.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}

// ValidatePolicy validates a policy once the document is read. It does not report what
// follows from a mistake that is reported already.
func (d *Document) ValidatePolicy(s policy.SourcePolicy, limit int) {
	if d.Flawed[d.Table+"enableIPv6"] {
		enabled := true
		s.EnableIPv6 = &enabled
	}
	if d.Flawed[d.Table+"cidrLimit"] {
		limit = math.MaxInt
	}
	err := s.Validate(limit)
	errs := []error{err}
	var joined interface{ Unwrap() []error }
	switch {
	case err == nil:
		return
	case errors.As(err, &joined):
		errs = joined.Unwrap()
	}
	for _, err := range errs {
		line := 0
		var mistake *policy.FieldError
		if errors.As(err, &mistake) {
			e := d.asWritten(*mistake)
			e.Key = d.Table + e.Key
			line, err = d.LineOf(e.Key, e.Index, d.Lines[e.Key].Line), e
		}
		d.NoteAt(line, err)
	}
}

// asWritten replaces indexes in the policy by those in the document, which also counts the
// items that were dropped because they are bad or repeated.
func (d *Document) asWritten(e policy.FieldError) *policy.FieldError {
	if indexes := d.Indexes[d.Table+e.Key]; e.Index >= 0 && e.Index < len(indexes) {
		e.Index = indexes[e.Index]
	}
	for name, indexes := range d.Indexes {
		key := strings.TrimPrefix(name, d.Table)
		before, rest, found := strings.Cut(e.Problem, key+"[")
		digits, after, closed := strings.Cut(rest, "]")
		at, err := strconv.Atoi(digits)
		// masqueradeCIDRs ends nonMasqueradeCIDRs in other letters, so no key ends another.
		if found && closed && err == nil && at >= 0 && at < len(indexes) {
			e.Problem = fmt.Sprintf("%s%s[%d]%s", before, key, indexes[at], after)
			break
		}
	}
	return &e
}
