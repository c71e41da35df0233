// SPDX-License-Identifier: Apache-2.0

package yamldoc_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/document"
	"github.com/ip-masq/ip-masq-cni/pkg/document/yamldoc"
)

func TestDecode(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want document.Document
	}{
		"nothing":        {"", document.Document{JSON: []byte("null"), Line: 1}},
		"a comment":      {"# nothing\n", document.Document{JSON: []byte("null"), Line: 1}},
		"lines of items": {"b: 1\na:\n- x\n\n- z\n", document.Document{JSON: []byte(`{"a":["x","z"],"b":1}`), Line: 1, Keys: []document.Key{{Name: "b", Line: 1}, {Name: "a", Line: 2, Items: []int{3, 5}}}}},
		"a key twice":    {"a: 1\na: 2\n", document.Document{JSON: []byte(`{"a":2}`), Line: 1, Keys: []document.Key{{Name: "a", Line: 1}, {Name: "a", Line: 2}}}},
		"JSON":           {`{"a": [null]}`, document.Document{JSON: []byte(`{"a":[null]}`), Line: 1, Keys: []document.Key{{Name: "a", Line: 1, Items: []int{1}}}}},
		"more":           {"a: 1\n---\nb: 2\n", document.Document{JSON: []byte(`{"a":1}`), Line: 1, More: true, Keys: []document.Key{{Name: "a", Line: 1}}}},
		"no more":        {"a: 1\n---\n", document.Document{JSON: []byte(`{"a":1}`), Line: 1, Keys: []document.Key{{Name: "a", Line: 1}}}},
		"a list":         {"\n- 1\n", document.Document{JSON: []byte(`[1]`), Line: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := yamldoc.Decode([]byte(c.text))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestDecodeRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"a: &x 1\n":                        "line 1: &x: anchors are not read; remove it, and write out what refers to it",
		"<<: {a: 1}\n":                     "line 1: <<: merges are not read; write out the keys",
		"a: 1\n? [b]\n: 2":                 "line 2: has a key that is no text; write the name of a key",
		"a:\n  b: 1\n  b: 2\n":             "line 3: b: is there twice; write it once",
		"a: [\n":                           "line 1: not YAML: did not find expected node content",
		"%TAG !a! tag:x\n---\na: 1\n":      "%TAG: directives are not read; remove it",
		"a: 1\n...\n%TAG !a! tag:x\n---\n": "%TAG: directives are not read; remove it",
		"\xfe\xff\x00a\x00:\x00 \x001":     "not YAML: it is UTF-16; save it as UTF-8",
	} {
		_, err := yamldoc.Decode([]byte(text))
		var e *document.Error
		if !errors.As(err, &e) || e.Error() != want {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}
