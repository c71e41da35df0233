// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func TestAbsentDirectoryIsEmptyAndStaysAbsent(t *testing.T) {
	d := open(t)
	same(t, load(t, d), store.State{})
	ok(t, d.Detach(aPod("net", "c", "eth0").Attachment))
	ok(t, d.Prune("net", nil))
	ok(t, d.CheckAttach("net"))
	ok(t, d.CheckWritable())
	n, changed, err := d.Attachments("net")
	if n != 0 || !changed.IsZero() || err != nil {
		t.Errorf("attachments: %d, %v, %v", n, changed, err)
	}
	absent(t, d.Path())
}

// Names may hold anything: none reaches a path, and no two meet.
func TestNamesFromOutsideAreHashed(t *testing.T) {
	d := open(t)
	names := []string{"..", "../../etc", "a/b", "a", "b", "ab", "A", "a\x00b", "network", strings.Repeat("n", 5000), "ü\u2028"}
	seen := map[string]bool{}
	for _, name := range names {
		seen[filepath.Base(document(t, d, newSource(name)))] = true
		ok(t, d.Attach(aPod(name, name, name)))
		ok(t, d.Attach(aPod(name, name+name, "")))
	}
	ok(t, d.Attach(aPod("two", "ab", "c")))
	ok(t, d.Attach(aPod("two", "a", "bc")))
	if n, _, err := d.Attachments("two"); n != 2 || err != nil {
		t.Errorf("attachments: %d, %v", n, err)
	}
	if len(seen) != len(names) || len(load(t, d).Sources) != len(names) {
		t.Errorf("%d names made %d documents", len(names), len(seen))
	}
	for path := range tree(t, d.Path()) {
		for part := range strings.SplitSeq(strings.TrimPrefix(path, "/"), "/") {
			switch part {
			case "", "made-by-ip-masq", "lock", "sources", "attachments", boot:
			default:
				if len(strings.TrimSuffix(part, ".json")) != 64 {
					t.Errorf("%s", path)
				}
			}
		}
	}
}

func TestTornAtEveryLength(t *testing.T) {
	d := open(t)
	whole := document(t, d, newSource("other"))
	file := document(t, d, full(t, "net"))
	ok(t, lock(t, d).PutRecord(aRecord()))
	record := d.Path() + "/record.json"
	for _, path := range []string{file, record} {
		data := assert.Must(os.ReadFile(path))(t)
		for n := range data {
			ok(t, os.WriteFile(path, data[:n], 0o600))
			s := load(t, d)
			if len(s.Unreadable) != 1 || s.Unreadable[0].File != path || s.Newer() != nil {
				t.Fatalf("%s at %d bytes: unreadable %v", path, n, s.Unreadable)
			}
			if path == record && !reflect.DeepEqual(s.Record, store.Record{}) {
				t.Fatalf("at %d bytes: record %+v", n, s.Record)
			}
			if path == file && (len(s.Sources) != 1 || s.Find(network("other")) == nil) {
				t.Fatalf("at %d bytes: %+v", n, s.Sources)
			}
		}
		ok(t, os.WriteFile(path, append(bytes.Clone(data), ' '), 0o600))
		if s := load(t, d); len(s.Unreadable) != 0 {
			t.Errorf("white space at the end: %v", s.Unreadable)
		}
		ok(t, os.WriteFile(path, data, 0o600))
	}
	if s := load(t, d); len(s.Sources) != 2 || whole == file {
		t.Errorf("made whole again: %+v", s)
	}
}

func TestDamagedDocuments(t *testing.T) {
	const source = `"source":{"kind":"network","name":"net"}`
	sound := ours() + `,` + source + `,"policy":{"masqChain":"POD-MASQ"}}`
	for name, c := range map[string]struct{ data, want string }{
		"sound":             {sound, ""},
		"no JSON":           {"\x00\x00\x00\x00", "does not begin with"},
		"list":              {`[1]`, "does not begin with"},
		"no schema":         {`{}`, "does not begin with"},
		"schema 0":          {`{"schema":0}`, "does not begin with"},
		"schema 1.0":        {`{"schema":1.0}`, "does not begin with"},
		"schema text":       {`{"schema":"1"}`, "does not begin with"},
		"schema far below":  {`{"schema":-99999999999999999999}`, "does not begin with"},
		"schema otherwise":  {`{"Schema":1}`, "does not begin with"},
		"two documents":     {sound + sound, "follows the end"},
		"text behind":       {sound + "x", "follows the end"},
		"unknown field":     {ours() + `,` + source + `,"policy":{"masqChain":"POD-MASQ"},"more":1}`, "more"},
		"unknown key":       {ours() + `,` + source + `,"policy":{"masqChain":"POD-MASQ","more":1}}`, "more"},
		"wrong type":        {ours() + `,` + source + `,"policy":[]}`, "cannot unmarshal"},
		"no source":         {ours() + `,"policy":{"masqChain":"POD-MASQ"}}`, "file name"},
		"unknown kind":      {ours() + `,"source":{"kind":"built-in"},"policy":{"masqChain":"POD-MASQ"}}`, "file name"},
		"unnamed network":   {ours() + `,"source":{"kind":"network"},"policy":{"masqChain":"POD-MASQ"}}`, "file name"},
		"named agent files": {ours() + `,"source":{"kind":"agent-files","name":"x"},"policy":{"masqChain":"POD-MASQ"}}`, "file name"},
		"another's":         {ours() + `,"source":{"kind":"network","name":"web"},"policy":{"masqChain":"POD-MASQ"}}`, `network "web"`},
		"no policy":         {ours() + `,` + source + `}`, "masqChain"},
		"bad chain":         {documentWith(`"masqChain":"POSTROUTING"`), "masqChain"},
		"null prefix":       {documentWith(`"masqChain":"A","masqueradeCIDRs":[null]`), "prefix"},
		"4in6":              {documentWith(`"masqChain":"A","enableIPv6":true,"nonMasqueradeSourceCIDRs":["::ffff:10.0.0.0/104"]`), "prefix"},
		"mark as a number":  {documentWith(`"masqChain":"A","bypassMark":24576`), "number"},
		"subnets' bits":     {strings.TrimSuffix(sound, "}") + `,"podSubnets":["10.0.0.1/8"]}`, "podSubnets[0]: 10.0.0.1/8"},
		"endless field":     {ours() + `,"` + strings.Repeat("x", 1<<20) + `":1}`, "unknown field"},
		"endless value":     {documentWith(`"masqChain":"` + strings.Repeat("x", 1<<20) + `"`), "masqChain"},
		"deep":              {ours() + `,"source":` + strings.Repeat("[", 100_000), "depth"},
	} {
		t.Run(name, func(t *testing.T) {
			d := open(t)
			file := document(t, d, newSource("net"))
			ok(t, os.WriteFile(file, []byte(c.data), 0o600))
			s := load(t, d)
			if c.want == "" {
				if len(s.Sources) != 1 || len(s.Unreadable) != 0 {
					t.Fatalf("%+v", s)
				}
				return
			}
			if len(s.Unreadable) != 1 || len(s.Sources) != 0 || s.Newer() != nil {
				t.Fatalf("%+v", s)
			}
			fails(t, s.Unreadable[0].Err, "read document", file, c.want, "moved aside")
			if n := len(s.Unreadable[0].Err.Error()); n > 2048 {
				t.Errorf("the message has %d bytes", n)
			}
		})
	}
}

// ours is how a document of this version begins.
func ours() string { return fmt.Sprintf(`{"schema":%d`, store.Schema()) }

func documentWith(keys string) string {
	return ours() + `,"source":{"kind":"network","name":"net"},"policy":{` + keys + `}}`
}

func TestDocumentThatIsTooBig(t *testing.T) {
	d := open(t)
	file := document(t, d, newSource("net"))
	ok(t, os.Truncate(file, 256<<20+1))
	s := load(t, d)
	if len(s.Unreadable) != 1 {
		t.Fatalf("%+v", s)
	}
	fails(t, s.Unreadable[0].Err, file, "268435457 bytes", "remove it")
}

func TestFilesThatAreNoDocuments(t *testing.T) {
	d := open(t)
	file := document(t, d, newSource("net"))
	sources := filepath.Dir(file)
	for _, name := range []string{"README", "x.json.damaged", "x.json.1.tmp", "copy.json"} {
		ok(t, os.WriteFile(filepath.Join(sources, name), []byte("?"), 0o600))
	}
	loads(t, d, newSource("net"))
	data := assert.Must(os.ReadFile(file))(t)
	copied := filepath.Join(sources, strings.Repeat("0", 64)+".json")
	ok(t, os.WriteFile(copied, data, 0o600))
	if s := load(t, d); len(s.Unreadable) != 1 || s.Unreadable[0].File != copied || len(s.Sources) != 1 {
		t.Errorf("%+v", s)
	}
}

// What this process lacks says nothing about a document, which must not be
// moved aside for it.
func TestTooManyOpenFilesDamageNothing(t *testing.T) {
	d := open(t)
	document(t, d, newSource("net"))
	var limit unix.Rlimit
	ok(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	// The lowest free descriptor is for the dataDir, the next for sources.
	probe, err := os.Open(os.DevNull)
	ok(t, err)
	few := unix.Rlimit{Cur: uint64(probe.Fd()) + 2, Max: limit.Max}
	ok(t, probe.Close())
	ok(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &few))
	s, err := d.Load()
	ok(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if !errors.Is(err, unix.EMFILE) || len(s.Unreadable) != 0 {
		t.Errorf("%+v, %v", s, err)
	}
}
