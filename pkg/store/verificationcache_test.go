// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func read(t *testing.T, d *store.Dir) *store.Reading {
	t.Helper()
	return assert.Must(d.Read())(t)
}

// cacheFile is the only cache file.
func cacheFile(t *testing.T, d *store.Dir) string {
	t.Helper()
	files := assert.Must(filepath.Glob(filepath.Join(d.Path(), "sources", "*.verified")))(t)
	if len(files) != 1 {
		t.Fatalf("files: %v", files)
	}
	return files[0]
}

func TestVerificationCache(t *testing.T) {
	d := open(t)
	short, long := store.VerificationCache{Inputs: "i", Entry: "e", Generation: "1.2"}, store.VerificationCache{Inputs: "other", Entry: "another", Generation: "12.3456"}
	if err := d.PutVerificationCache(network("net"), short); err == nil {
		t.Error("written where there is no document")
	}
	same(t, d.VerificationCache(network("net")), store.VerificationCache{})
	l := lock(t, d)
	store1(t, l, newSource("net", "10.0.0.0/8"))
	store1(t, l, newSource("other"))
	same(t, d.VerificationCache(network("net")), store.VerificationCache{})
	for _, s := range []store.VerificationCache{short, long, short} {
		ok(t, d.PutVerificationCache(network("net"), s))
		same(t, d.VerificationCache(network("net")), s)
		same(t, d.VerificationCache(network("net")), s)
		same(t, d.VerificationCache(network("other")), store.VerificationCache{})
		same(t, d.VerificationCache(policy.SourceID{}), store.VerificationCache{})
	}
	loads(t, d, newSource("net", "10.0.0.0/8"), newSource("other"))
	path := cacheFile(t, d)
	ok(t, l.Tidy())
	same(t, d.VerificationCache(network("net")), short)

	text := assert.Must(os.ReadFile(path))(t)
	for cut := range text {
		ok(t, os.WriteFile(path, text[:cut], 0o600))
		same(t, d.VerificationCache(network("net")), store.VerificationCache{})
	}
	ok(t, os.WriteFile(path, []byte(strings.Repeat("x", 1<<20)), 0o600))
	same(t, d.VerificationCache(network("net")), store.VerificationCache{})

	// One that is not trusted is replaced.
	for _, spoil := range []func() error{
		func() error { return os.Chmod(path, 0o666) },
		func() error { return os.Remove(path) },
		func() error { return errors.Join(os.Remove(path), os.Symlink("/dev/null", path)) },
	} {
		ok(t, spoil())
		same(t, d.VerificationCache(network("net")), store.VerificationCache{})
		ok(t, d.PutVerificationCache(network("net"), long))
		same(t, d.VerificationCache(network("net")), long)
	}
	ok(t, drop(l, network("net")))
	absent(t, path)

	// What is not a file is not replaced.
	store1(t, l, newSource("net"))
	ok(t, os.Mkdir(path, 0o700))
	if err := d.PutVerificationCache(network("net"), long); err == nil {
		t.Error("written in the place of a directory")
	}
	same(t, d.VerificationCache(network("net")), store.VerificationCache{})
}

// TestDigest: it is another one whenever something that was read is, or
// one of the other texts, and there is none if something that was read is refused.
func TestDigest(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	seen := map[string]string{}
	is := func(what string, others ...string) {
		t.Helper()
		of := func() string { return store.Digest(append(others, read(t, d).Digest())...) }
		digest := of()
		if digest != of() {
			t.Errorf("%s: no digest, or one that depends on the cache: %q", what, digest)
		}
		if before, met := seen[digest]; met {
			t.Errorf("%s has the digest of %s", what, before)
		}
		seen[digest] = what
	}
	is("nothing")
	is("others", "a", "bc")
	is("others, divided otherwise", "ab", "c")
	store1(t, l, newSource("net"))
	is("a document")
	store1(t, l, newSource("net", "10.0.0.0/8"))
	is("another one")
	store1(t, l, newSource("other"))
	is("two")
	ok(t, l.PutRecord(store.Record{Boot: boot}))
	is("a record")
	aside := filepath.Join(d.Path(), "sources", strings.Repeat("0", 64)+".json")
	ok(t, os.Rename(d.RecordPath(), aside))
	is("the record among the documents")
	ok(t, os.Rename(aside, d.RecordPath()))
	ok(t, drop(l, network("net")))
	is("the second alone")
	ok(t, d.PutVerificationCache(network("other"), store.VerificationCache{Inputs: "i", Entry: "e", Generation: "m"}))
	if _, met := seen[store.Digest(read(t, d).Digest())]; !met {
		t.Error("the cache makes another digest")
	}
	ok(t, os.Chmod(d.DocumentPath(network("other")), 0o666))
	same(t, read(t, d).Digest(), "")
	ok(t, os.Chmod(d.DocumentPath(network("other")), 0o600))
	ok(t, os.Chmod(d.RecordPath(), 0o666))
	same(t, read(t, d).Digest(), "")
}
