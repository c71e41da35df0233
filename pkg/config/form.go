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

// form is a document that is being read.
type form struct {
	file string // "" for a document that is no file
	line int    // of the key that is being read

	mistakes []error
	flawed   map[string]bool  // the keys that mistakes were found in
	places   map[string][]int // of the items kept of each list: their places in the document
}

// fail notes a mistake; index is -1 for what is no item of a list.
func (f *form) fail(key string, index int, value, problem string) {
	if f.flawed == nil {
		f.flawed = map[string]bool{}
	}
	f.flawed[key] = true
	f.note(&policy.FieldError{Key: key, Index: index, Value: value, Problem: problem})
}

func (f *form) note(mistake error) {
	switch {
	case f.file != "" && f.line > 0:
		mistake = fmt.Errorf("%s:%d: %w", shown(f.file), f.line, mistake)
	case f.file != "":
		mistake = fmt.Errorf("%s: %w", shown(f.file), mistake)
	}
	f.mistakes = append(f.mistakes, mistake)
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
		isKnown := inTable || isProtocolKey(m.key)
		switch {
		case !isKnown && times[m.key] == 1:
			f.fail(m.key, -1, "", f.unknown(m.key, keys))
		case !isKnown || times[m.key] > 2:
		case times[m.key] == 2:
			f.fail(m.key, -1, "", "is there twice; write it once")
		case m.err != nil:
			f.fail(m.key, -1, "", m.err.Error())
		case k.read != nil:
			k.read(f, m.key, m.value)
		}
	}
	f.line = 0
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
