// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/BurntSushi/toml"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ErrNotJSON reports text that is not JSON (RFC 8259): error code 6 of CNI, where a
// configuration that is JSON but wrong has 7 (CNI spec, section "Error").
var ErrNotJSON = errors.New("configuration is not JSON")

// Limits on the messages about one document.
const (
	MaxShown    = 8      // mistakes
	maxMistakes = 10_000 // after which list items are not read
)

// DocumentError holds every mistake in one document, in its order.
type DocumentError struct{ Mistakes []error }

// Error writes the first mistakes on one line, followed by the number of the others.
func (e *DocumentError) Error() string {
	texts := make([]string, len(e.Mistakes))
	for i, mistake := range e.Mistakes {
		texts[i] = mistake.Error()
	}
	return strings.Join(policy.First(MaxShown, texts), "; ")
}

// Unwrap returns the mistakes: policy.FieldErrors for those about a key.
func (e *DocumentError) Unwrap() []error { return e.Mistakes }

// Member is one key of a document with its value as JSON.
type Member struct {
	Key   string
	Value json.RawMessage
	Err   error // why the value cannot be written as JSON
	Line  int   // 0 if unknown
}

// Key is a key that a document may have. Without a Value it is ignored.
type Key struct {
	Name string
	Value
	Placeholder string // of the value of the key's flag; "" for a boolean
	Usage       string // of the flag: one line
}

// Document is a document while it is read. The maps are by key, with Table before it.
type Document struct {
	File  string // "" if the document is not a file
	Table string // "agent." while the policy in that table is validated

	Mistakes []error
	Flawed   map[string]bool  // keys with a mistake
	Lines    map[string]int   // of keys; 0 if unknown
	Indexes  map[string][]int // of the items of lists that were kept: bad and repeated ones are dropped
}

// Fail records a mistake. The index is -1 for a mistake that is not about a list item.
func (d *Document) Fail(key string, index int, value, problem string) {
	key = d.Table + key
	if d.Flawed == nil {
		d.Flawed = map[string]bool{}
	}
	d.Flawed[key] = true
	d.NoteAt(d.Lines[key], &policy.FieldError{Key: key, Index: index, Value: value, Problem: problem})
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

// Read reads all members. A key that the table does not have, or that comes twice, is a mistake.
func (d *Document) Read(members []Member, keys []Key) {
	known := make(map[string]Key, len(keys))
	for _, k := range keys {
		known[k.Name] = k
	}
	var unknown *UnknownKeys // of no document without an unknown key: each ADD reads one
	times := make(map[string]int, len(members))
	d.Lines, d.Indexes = map[string]int{}, map[string][]int{}
	for _, m := range members {
		if m.Line > 0 {
			d.Lines[m.Key] = m.Line
		}
		k, isInTable := known[m.Key]
		isOfRuntime := d.File == "" && isReserved(m.Key) // in an entry on stdin
		isKnown := isInTable || isOfRuntime
		times[m.Key]++
		if times[m.Key] > 1 {
			if isKnown && times[m.Key] == 2 { // said once
				d.Fail(m.Key, -1, "", "is there twice; write it once")
			}
			continue
		}
		if !isKnown {
			if unknown == nil {
				unknown = NewUnknownKeys(members, keys)
			}
			d.failUnknown(m.Key, unknown)
			continue
		}
		if m.Err != nil {
			d.Fail(m.Key, -1, "", m.Err.Error())
			continue
		}
		k.Read(d, m.Key, m.Value) // nothing, of a key of the runtime
	}
}

func (d *Document) failUnknown(key string, u *UnknownKeys) {
	problem := d.unknown(key, u)
	if problem != "" {
		d.Fail(key, -1, "", problem)
	}
}

// unknown returns the problem of an unknown key, or "" if that of an earlier key covers it.
func (d *Document) unknown(name string, u *UnknownKeys) string {
	const problem = "is not a known key; "
	if len(d.Mistakes) >= MaxShown {
		return problem + "remove it" // not shown: the search would be wasted
	}
	for _, k := range u.keys {
		if table, found := strings.CutSuffix(k.Name, "."+name); found {
			return "is a key of [" + table + "]; write it below that line"
		}
	}
	remedy := u.Remedy(name)
	if remedy == "" {
		return ""
	}
	return problem + remedy
}

// isReserved reports whether the CNI spec reserves the key for the runtime.
func isReserved(key string) bool { return strings.HasPrefix(key, "cni.dev/") }

// ValidatePolicy validates a policy after the document was read, without consequences of mistakes in it.
func (d *Document) ValidatePolicy(s policy.SourcePolicy, limit int) {
	if d.Flawed[d.Table+"enableIPv6"] {
		s.EnableIPv6 = new(true)
	}
	if d.Flawed[d.Table+"cidrLimit"] {
		limit = math.MaxInt
	}
	var joined interface{ Unwrap() []error } // as Validate joins its errors
	if !errors.As(s.Validate(limit), &joined) {
		return
	}
	for _, err := range joined.Unwrap() {
		line := 0
		if mistake := (*policy.FieldError)(nil); errors.As(err, &mistake) {
			mistake.Key = d.Table + mistake.Key
			mistake.Index = d.Index(mistake.Key, mistake.Index)
			line = d.Lines[mistake.Key]
		}
		d.NoteAt(line, err)
	}
}

// Index returns the index in the document of an item that was kept.
func (d *Document) Index(key string, kept int) int {
	if indexes := d.Indexes[key]; kept >= 0 && kept < len(indexes) {
		return indexes[kept]
	}
	return kept
}

// JSONMembers returns the keys of a JSON object, repeated ones included.
func JSONMembers(doc []byte) ([]Member, error) {
	// JSON is UTF-8 (RFC 8259, 8.1); the decoder would replace anything else.
	if !utf8.Valid(doc) {
		return nil, fmt.Errorf("%w: it has invalid UTF-8", ErrNotJSON)
	}
	if !json.Valid(doc) {
		return nil, syntaxError(doc, json.Unmarshal(doc, &json.RawMessage{}))
	}
	whole := json.RawMessage(bytes.TrimSpace(doc))
	if k := KindOf(whole); k != Object {
		return nil, fmt.Errorf("configuration is JSON, but %s; write an object, in braces", k)
	}
	return membersOf(whole), nil
}

// membersOf returns the keys of an object; null has none. The values are parts of the text, as in elements.
func membersOf(object json.RawMessage) []Member {
	if KindOf(object) == Null {
		return nil
	}
	parts := elements(object)
	members := make([]Member, 0, len(parts)/2)
	for i := 0; i+1 < len(parts); i += 2 {
		name, _ := stringValue(parts[i])
		members = append(members, Member{Key: name, Value: parts[i+1]})
	}
	return members
}

// elements returns the items of a list, or keys and values of an object in turn, of valid trimmed JSON.
func elements(value json.RawMessage) []json.RawMessage {
	var parts []json.RawMessage
	depth, start, quoted := 0, 1, false
	for i := 0; i < len(value); i++ {
		c := value[i]
		if quoted && c == '\\' {
			i++ // the next byte does not end the string
			continue
		}
		if c == '"' {
			quoted = !quoted
		}
		if quoted {
			continue
		}
		switch c {
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		}
		isEnd := depth == 0 // of the list or the object
		isSeparator := depth == 1 && (c == ',' || c == ':')
		if !isEnd && !isSeparator {
			continue
		}
		if part := bytes.TrimSpace(value[start:i]); len(part) > 0 { // none in [] and {}
			parts = append(parts, part)
		}
		start = i + 1
	}
	return parts
}

// syntaxError returns the position at which a document stops to be JSON.
func syntaxError(doc []byte, err error) error {
	var syntax *json.SyntaxError
	switch {
	case len(bytes.TrimSpace(doc)) == 0:
		return fmt.Errorf("%w: it is empty", ErrNotJSON)
	case bytes.HasPrefix(doc, []byte("\ufeff")):
		return fmt.Errorf("%w: it begins with a byte order mark; save it without", ErrNotJSON)
	case errors.As(err, &syntax):
		before := doc[:max(0, min(int(syntax.Offset), len(doc))-1)]
		line, column := 1+bytes.Count(before, []byte("\n")), len(before)-bytes.LastIndexByte(before, '\n')
		err = fmt.Errorf("line %d, column %d: %w", line, column, err)
	}
	return fmt.Errorf("%w: %s", ErrNotJSON, policy.Printable(err.Error()))
}

// maxTOMLSize is in bytes. The decoder can take quadratic time.
const maxTOMLSize = 64 << 10

// tomlMembers returns the top-level keys of a TOML document in order, and those of tables as "table.key".
func tomlMembers(file string, doc []byte, tables ...string) ([]Member, error) {
	var values map[string]any
	md, err := toml.Decode(string(doc), &values)
	var syntax toml.ParseError
	d := Document{File: file}
	switch {
	case errors.As(err, &syntax) && syntax.Position.Line > 0:
		return nil, d.Locate(syntax.Position.Line, errors.New("not TOML: "+policy.Printable(syntax.Message)))
	case err != nil:
		return nil, d.Locate(0, errors.New("not TOML: "+policy.Printable(err.Error())))
	}
	var members []Member
	seen, lines := map[string]bool{}, tomlLines(string(doc))
	for _, path := range md.Keys() {
		m, value := Member{Key: path[0]}, values[path[0]]
		table, isTable := value.(map[string]any)
		isInTable := isTable && len(path) > 1 && slices.Contains(tables, path[0])
		if isInTable {
			m.Key += "." + path[1]
			value = table[path[1]]
		}
		if seen[m.Key] {
			continue
		}
		seen[m.Key] = true
		m.Value, err = json.Marshal(value)
		if err != nil {
			m.Err = errors.New("holds a number that is not finite; write a finite one")
		}
		m.Line = cmp.Or(lines[m.Key], lines[path[0]])
		members = append(members, m)
	}
	return members, nil
}

// tomlLines returns the first lines of keys and tables. Keys in tables are "table.key"; those in inline
// tables have none.
func tomlLines(doc string) map[string]int {
	lines, table, n := map[string]int{}, "", 0
	for line := range strings.Lines(doc) {
		n++
		line = strings.TrimSpace(line)
		name, _, _ := strings.Cut(line, "=")
		name = table + strings.Trim(name, " \t\"'")
		if header, isHeader := strings.CutPrefix(line, "["); isHeader {
			name, _, _ = strings.Cut(strings.TrimLeft(header, "["), "]")
			name = strings.Trim(name, " \t\"'")
			table = name + "."
		}
		top, _, _ := strings.Cut(name, ".")
		for _, key := range []string{top, name} {
			lines[key] = cmp.Or(lines[key], n)
		}
	}
	return lines
}
