// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func TestNewerDocumentsAreLeftAlone(t *testing.T) {
	next := store.Schema() + 1
	for name, c := range map[string]struct {
		data   string
		schema int
	}{
		"like ours":  {fmt.Sprintf(`{"schema":%d,"source":{"kind":"network","name":"net"},"policy":{"masqChain":"A"}}`, next), next},
		"other form": {fmt.Sprintf(`{"schema":%d,"source":[[]],"written":true}`, next), next},
		"torn":       {fmt.Sprintf(`{"schema":%d,"sou`, next+1), next + 1},
		"huge":       {`{"schema":` + strings.Repeat("9", 20) + `}`, 1<<63 - 1},
	} {
		t.Run(name, func(t *testing.T) {
			d := open(t)
			file := document(t, d, newSource("net"))
			record := d.Path() + "/record.json"
			for _, f := range []string{file, record} {
				ok(t, os.WriteFile(f, []byte(c.data), 0o600))
			}
			before := tree(t, d.Path())
			s := load(t, d)
			for i, path := range []string{file, record} {
				fails(t, s.Unreadable[i].Err, "document "+path, fmt.Sprintf("it has schema %d and this program knows schemas up to %d", c.schema, store.Schema()))
			}
			same(t, s, store.State{Unreadable: []store.FileError{{File: file, Err: s.Unreadable[0].Err}, {File: record, Err: s.Unreadable[1].Err}}})

			l := lock(t, d)
			ok(t, l.Tidy())
			for _, err := range []error{l.Put(newSource("net")), drop(l, network("net")), l.PutRecord(aRecord())} {
				if !errors.Is(err, store.ErrNewer) {
					t.Errorf("got %v, want ErrNewer", err)
				}
				fails(t, err, d.Path(), "schema", "install the newer")
			}
			same(t, tree(t, d.Path()), before)
			for _, f := range []string{file, record} {
				if data, err := os.ReadFile(f); string(data) != c.data || err != nil {
					t.Errorf("%s: %s, %v", f, data, err)
				}
			}
		})
	}
}

// A file of an older version is read if it has today's form.
func TestOlderDocuments(t *testing.T) {
	d := open(t)
	file, other := document(t, d, newSource("net", "10.0.0.0/8")), document(t, d, newSource("other"))
	l := lock(t, d)
	ok(t, l.PutRecord(aRecord()))
	record := d.Path() + "/record.json"
	rewrite := func(path, was, is string) {
		data := assert.Must(os.ReadFile(path))(t)
		ok(t, os.WriteFile(path, bytes.Replace(data, []byte(was), []byte(is), 1), 0o600))
	}
	for schema := store.Schema() - 1; schema >= 1; schema-- {
		for _, path := range []string{file, other, record} {
			rewrite(path, fmt.Sprintf(`{"schema":%d`, schema+1), fmt.Sprintf(`{"schema":%d`, schema))
		}
		loads(t, d, newSource("net", "10.0.0.0/8"), newSource("other"))
		same(t, load(t, d).Record, aRecord())
	}
	ok(t, l.PutRecord(aRecord()))
	rewrite(other, `"policy"`, `"unknown"`)
	s := load(t, d)
	if len(s.Unreadable) != 1 || len(s.Sources) != 1 {
		t.Fatalf("%+v", s)
	}
	fails(t, s.Unreadable[0].Err, other, "moved aside")
}

// The lock writes documents of older versions again, before rules change: an older version must not revert
// these.
func TestOlderDocumentsAreUpgraded(t *testing.T) {
	d := open(t)
	older, damaged := document(t, d, newSource("net", "10.0.0.0/8")), document(t, d, newSource("other"))
	now := assert.Must(os.ReadFile(older))(t)
	was := bytes.Replace(now, fmt.Appendf(nil, `{"schema":%d`, store.Schema()), fmt.Appendf(nil, `{"schema":%d`, store.Schema()-1), 1)
	torn := was[:len(was)/2]
	ok(t, os.WriteFile(older, was, 0o600))
	ok(t, os.WriteFile(damaged, torn, 0o600))
	written := time.Now().Add(-time.Hour).Truncate(time.Second)
	ok(t, os.Chtimes(older, written, written))
	for range 2 {
		ok(t, assert.Must(d.Lock(t.Context()))(t).Release())
		assert.Equal(t, "the document", string(assert.Must(os.ReadFile(older))(t)), string(now))
		assert.Equal(t, "when the policy changed", assert.Must(d.Written(network("net")))(t), written)
		assert.Equal(t, "the damaged one", string(assert.Must(os.ReadFile(damaged))(t)), string(torn))
	}
}
