// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// member is one key of a document with its value.
type Member struct {
	Key   string
	Value json.RawMessage
	Err   error // why the value has no form in JSON
	Line  int   // where it stands; 0 where lines say nothing
	ItemLines []int // the lines of the items of a list, where they are known

	Spelled string // as the document has the key, where its kind lets that differ
}

// key is one that a kind of document may have. Without a reader it is known,
// and is somebody else's to read.
type Key struct {
	Name string
	Read reader
}

// reader takes the value of a key, stores it where its maker said, and tells
// the form about mistakes.
type reader func(f *Document, key string, value json.RawMessage)

// takes reports whether a key can have such a value. Its reader stores the value.
func Takes(k Key, value string) bool {
	var unheard Document
	k.Read(&unheard, k.Name, json.RawMessage(value))
	return len(unheard.Mistakes) == 0
}

// written is where a key and its items stand.
type Position struct {
	Line  int
	ItemLines []int
}

// form is a document that is being read.
type Document struct {
	File     string // "" for a document that is no file
	Settings string // the reconciler's file, which holds OwnPolicy in its table [agent]
	Table    string // what stands before its keys in messages: "agent." in a table of that name
	line     int    // of the key that is being read

	Mistakes []error
	Flawed   map[string]bool    // the keys that mistakes were found in
	Indexes   map[string][]int   // of the items kept of each list: their places in the document
	Lines    map[string]Position // of the keys that were read
}

// fail notes a mistake; index is -1 for what is no item of a list.
func (f *Document) Fail(key string, index int, value, problem string) {
	if f.Flawed == nil {
		f.Flawed = map[string]bool{}
	}
	f.Flawed[key] = true
	f.NoteAt(f.LineOf(key, index, f.line), &policy.FieldError{Key: f.Table + key, Index: index, Value: value, Problem: problem})
}

// lineOf returns the line of an item, or of the key where items have no lines.
func (f *Document) LineOf(key string, index, otherwise int) int {
	if items := f.Lines[key].ItemLines; index >= 0 && index < len(items) {
		return items[index]
	}
	return otherwise
}

func (f *Document) Note(mistake error) { f.NoteAt(f.line, mistake) }

func (f *Document) NoteAt(line int, mistake error) {
	f.Mistakes = append(f.Mistakes, f.Locate(line, mistake))
}

// located says in which file, and on which line of it, something is.
func (f *Document) Locate(line int, what error) error {
	switch {
	case f.Settings != "" && line > 0:
		return fmt.Errorf("%s:%d: %s.%w", policy.Printable(f.Settings), line, agentTable, what)
	case f.File != "" && line > 0:
		return fmt.Errorf("%s:%d: %w", policy.Printable(f.File), line, what)
	case f.File != "":
		return fmt.Errorf("%s: %w", policy.Printable(f.File), what)
	}
	return what
}

// err returns all the mistakes as one error.
func (f *Document) Err() error {
	if len(f.Mistakes) == 0 {
		return nil
	}
	return &DocumentError{Mistakes: f.Mistakes}
}

// read reads every member that the table knows; any other is a mistake, and so
// is one that comes twice.
func (f *Document) Read(members []Member, keys []Key) {
	known := make(map[string]Key, len(keys))
	for _, k := range keys {
		known[k.Name] = k
	}
	times := make(map[string]int, len(members))
	for _, m := range members {
		f.line = m.Line
		times[m.Key]++
		k, inTable := known[m.Key]
		isKnown := inTable || f.File == "" && isProtocolKey(m.Key)
		switch {
		case !isKnown && times[m.Key] == 1:
			f.Fail(m.Key, -1, "", f.unknown(m.Key, keys))
		case !isKnown || times[m.Key] > 2:
		case times[m.Key] == 2:
			f.Fail(m.Key, -1, "", "is there twice"+m.otherwise()+"; write it once")
		case m.Err != nil:
			f.Fail(m.Key, -1, "", m.Err.Error())
		case k.Read != nil:
			f.remember(m)
			k.Read(f, m.Key, m.Value)
		}
	}
	f.line = 0
}

func (f *Document) remember(m Member) {
	if m.Line == 0 {
		return
	}
	if f.Lines == nil {
		f.Lines = map[string]Position{}
	}
	f.Lines[m.Key] = Position{m.Line, m.ItemLines}
}

// otherwise tells how the document spells a key, where that is not how it is
// known: people search for what they wrote.
func (m Member) otherwise() string {
	if m.Spelled == "" || m.Spelled == m.Key {
		return ""
	}
	return ", as " + policy.Printable(m.Spelled)
}

func (f *Document) unknown(name string, keys []Key) string {
	if name == "" {
		return "a key without a name is no key; remove it"
	}
	// What is not going to be shown need not be searched for.
	if len(f.Mistakes) < MaxShown {
		if near := Nearest(name, keys); near != "" {
			return "is not a known key; did you mean " + near + "?"
		}
	}
	return "is not a known key; remove it"
}

// isProtocolKey reports whether the key lies in the name space that the CNI
// spec keeps for what runtimes tell plugins.
func isProtocolKey(key string) bool { return strings.HasPrefix(key, "cni.dev/") }
