// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// member is one key of a document with its value.
type member struct {
	key   string
	value json.RawMessage
	err   error // why the value has no form in JSON
	line  int   // where it stands; 0 where lines say nothing
	items []int // the lines of the items of a list, where they are known

	spelled string // as the document has the key, where its kind lets that differ
}

// key is one that a kind of document may have. Without a reader it is known,
// and is somebody else's to read.
type key struct {
	name string
	read reader
}

// reader takes the value of a key, stores it where its maker said, and tells
// the form about mistakes.
type reader func(f *form, key string, value json.RawMessage)

// takes reports whether a key can have such a value. Its reader stores the value.
func takes(k key, value string) bool {
	var unheard form
	k.read(&unheard, k.name, json.RawMessage(value))
	return len(unheard.mistakes) == 0
}

// written is where a key and its items stand.
type written struct {
	line  int
	items []int
}

// form is a document that is being read.
type form struct {
	file     string // "" for a document that is no file
	settings string // the reconciler's file, which holds OwnPolicy in its table [agent]
	table    string // what stands before its keys in messages: "agent." in a table of that name
	line     int    // of the key that is being read

	mistakes []error
	flawed   map[string]bool    // the keys that mistakes were found in
	places   map[string][]int   // of the items kept of each list: their places in the document
	lines    map[string]written // of the keys that were read
}

// fail notes a mistake; index is -1 for what is no item of a list.
func (f *form) fail(key string, index int, value, problem string) {
	if f.flawed == nil {
		f.flawed = map[string]bool{}
	}
	f.flawed[key] = true
	f.noteAt(f.lineOf(key, index, f.line), &policy.FieldError{Key: f.table + key, Index: index, Value: value, Problem: problem})
}

// lineOf returns the line of an item, or of the key where items have no lines.
func (f *form) lineOf(key string, index, otherwise int) int {
	if items := f.lines[key].items; index >= 0 && index < len(items) {
		return items[index]
	}
	return otherwise
}

func (f *form) note(mistake error) { f.noteAt(f.line, mistake) }

func (f *form) noteAt(line int, mistake error) {
	f.mistakes = append(f.mistakes, f.located(line, mistake))
}

// located says in which file, and on which line of it, something is.
func (f *form) located(line int, what error) error {
	switch {
	case f.settings != "" && line > 0:
		return fmt.Errorf("%s:%d: %s.%w", policy.Shown(f.settings), line, agentTable, what)
	case f.file != "" && line > 0:
		return fmt.Errorf("%s:%d: %w", policy.Shown(f.file), line, what)
	case f.file != "":
		return fmt.Errorf("%s: %w", policy.Shown(f.file), what)
	}
	return what
}

// err returns all the mistakes as one error.
func (f *form) err() error {
	if len(f.mistakes) == 0 {
		return nil
	}
	return &DocumentError{Mistakes: f.mistakes}
}

// read reads every member that the table knows; any other is a mistake, and so
// is one that comes twice.
func (f *form) read(members []member, keys []key) {
	known := make(map[string]key, len(keys))
	for _, k := range keys {
		known[k.name] = k
	}
	times := make(map[string]int, len(members))
	for _, m := range members {
		f.line = m.line
		times[m.key]++
		k, inTable := known[m.key]
		isKnown := inTable || f.file == "" && isProtocolKey(m.key)
		switch {
		case !isKnown && times[m.key] == 1:
			f.fail(m.key, -1, "", f.unknown(m.key, keys))
		case !isKnown || times[m.key] > 2:
		case times[m.key] == 2:
			f.fail(m.key, -1, "", "is there twice"+m.otherwise()+"; write it once")
		case m.err != nil:
			f.fail(m.key, -1, "", m.err.Error())
		case k.read != nil:
			f.remember(m)
			k.read(f, m.key, m.value)
		}
	}
	f.line = 0
}

func (f *form) remember(m member) {
	if m.line == 0 {
		return
	}
	if f.lines == nil {
		f.lines = map[string]written{}
	}
	f.lines[m.key] = written{m.line, m.items}
}

// otherwise tells how the document spells a key, where that is not how it is
// known: people search for what they wrote.
func (m member) otherwise() string {
	if m.spelled == "" || m.spelled == m.key {
		return ""
	}
	return ", as " + policy.Shown(m.spelled)
}

func (f *form) unknown(name string, keys []key) string {
	if name == "" {
		return "a key without a name is no key; remove it"
	}
	// What is not going to be shown need not be searched for.
	if len(f.mistakes) < mostShown {
		if near := nearest(name, keys); near != "" {
			return "is not a known key; did you mean " + near + "?"
		}
	}
	return "is not a known key; remove it"
}

// isProtocolKey reports whether the key lies in the name space that the CNI
// spec keeps for what runtimes tell plugins.
func isProtocolKey(key string) bool { return strings.HasPrefix(key, "cni.dev/") }
