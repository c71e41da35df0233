// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// aRecord is one of each form, in an order that is not sorted: order is kept.
func aRecord() store.Record {
	return store.Record{Boot: boot, Chains: []store.OwnedChain{
		{Chain: "POD-MASQ", Family: policy.IPv6, Backend: policy.NFTables},
		{Chain: "IP-MASQ-AGENT", Family: policy.IPv4, Backend: policy.IPTables, Variant: "nft"},
		{Chain: "IP-MASQ-AGENT", Family: policy.IPv4, Backend: policy.IPTables, Variant: "legacy", RemovalFailed: true},
	}}
}

func TestPutRefusesWhatWouldNotLoad(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	for name, c := range map[string]policy.Source{
		"nothing":       {},
		"no chain":      {ID: network("net")},
		"no prefix":     {ID: network("net"), Policy: policy.SourcePolicy{Chain: "A", SourceCIDRs: []netip.Prefix{{}}}},
		"wrong backend": {ID: network("net"), Policy: policy.SourcePolicy{Chain: "A", Backend: "ebtables"}},
	} {
		fails(t, l.Put(c), "write document", d.Path())
		if t.Failed() {
			t.Fatal(name)
		}
	}
	if files := sourceFiles(t, d); len(files) != 0 {
		t.Errorf("left: %v", files)
	}
	loads(t, d)
}

func TestRecord(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	file := d.Path() + "/record.json"
	ok(t, l.PutRecord(aRecord()))
	same(t, load(t, d).Record, aRecord())

	before := assert.Must(os.Stat(file))(t)
	ok(t, l.PutRecord(aRecord()))
	after := assert.Must(os.Stat(file))(t)
	if !os.SameFile(before, after) || !before.ModTime().Equal(after.ModTime()) {
		t.Error("an equal record was written")
	}

	other := aRecord()
	other.Chains[0], other.Chains[1] = other.Chains[1], other.Chains[0]
	ok(t, l.PutRecord(other))
	same(t, load(t, d).Record, other)
	ok(t, l.PutRecord(store.Record{Boot: boot}))
	same(t, load(t, d).Record, store.Record{Boot: boot})
	if left, err := filepath.Glob(d.Path() + "/*.tmp"); len(left) != 0 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}

	ok(t, os.WriteFile(file, []byte("{"), 0o600))
	ok(t, l.PutRecord(other)) // what is damaged is replaced
	same(t, load(t, d).Record, other)
}

// What a record lists is removed some day: it must not name what is not ours.
func TestRecordThatCannotBeOurs(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	for name, c := range map[string]store.OwnedChain{
		"POSTROUTING": {Chain: "POSTROUTING", Family: policy.IPv4, Backend: policy.NFTables},
		"family":      {Chain: "A", Family: "arp", Backend: policy.NFTables},
		"backend":     {Chain: "A", Family: policy.IPv4, Backend: policy.Auto},
		"no variant":  {Chain: "A", Family: policy.IPv4, Backend: policy.IPTables},
		"variant":     {Chain: "A", Family: policy.IPv4, Backend: policy.NFTables, Variant: "nft"},
	} {
		fails(t, l.PutRecord(store.Record{Chains: []store.OwnedChain{c}}), "record.json", "chains[0]")
		if t.Failed() {
			t.Fatal(name)
		}
	}
	absent(t, d.Path()+"/record.json")
	text := fmt.Sprintf(`{"schema":%d,"chains":[{"chain":"POSTROUTING","family":"ipv4","backend":"nftables"}]}`, store.Schema())
	ok(t, os.WriteFile(d.Path()+"/record.json", []byte(text), 0o600))
	s := load(t, d)
	if len(s.Unreadable) != 1 || len(s.Record.Chains) != 0 {
		t.Errorf("%+v", s)
	}
}

func TestBadResets(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	resets := []store.Reset{{At: 1, Before: []policy.Source{full(t, "net")}}}
	ok(t, l.PutRecord(store.Record{Boot: boot, Resets: resets, LastReset: 1}))
	same(t, load(t, d).Record.Resets, resets)
	resets[0].Before[0].Policy.Chain = ""
	fails(t, l.PutRecord(store.Record{Resets: resets}), "record.json", "resets[0].before")
}

// A damaged document stays where it is until the one that replaces it is complete.
func TestDamagedDocumentsAreMovedAside(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	store1(t, l, newSource("other"))
	store1(t, l, newSource("net"))
	ok(t, l.PutRecord(aRecord()))
	file := fileOf(t, d, "net")
	record := d.Path() + "/record.json"
	for _, text := range []string{"first", "second"} { // an older one is replaced
		for _, path := range []string{file, record} {
			ok(t, os.WriteFile(path, []byte(text), 0o600))
		}
		s := load(t, d)
		same(t, len(s.Unreadable), 2)
		ok(t, l.Tidy())
		for _, path := range []string{file, record} {
			if data, err := os.ReadFile(path); string(data) != text || err != nil {
				t.Errorf("%s: %s, %v", path, data, err)
			}
		}
		store1(t, l, newSource("net"))
		ok(t, l.PutRecord(aRecord()))
		for _, path := range []string{file, record} {
			if data, err := os.ReadFile(path + ".damaged"); string(data) != text || err != nil {
				t.Errorf("%s.damaged: %s, %v", path, data, err)
			}
		}
		loads(t, d, newSource("net"), newSource("other"))
	}
	ok(t, errors.Join(os.Remove(file), os.MkdirAll(file+"/sub", 0o700)))
	fails(t, drop(l, network("net")), file, "is not ip-masq's")
	ok(t, os.RemoveAll(file))
	loads(t, d, newSource("other"))
}

// A process that is killed while it writes leaves a temporary file.
func TestTidyRemovesTemporaryFiles(t *testing.T) {
	d := open(t)
	document(t, d, newSource("podnet", "10.0.0.0/8"))
	for _, file := range []string{d.DocumentPath(network("podnet")), d.RecordPath()} {
		ok(t, os.WriteFile(file+".x.tmp", []byte("{"), 0o600))
	}
	same(t, len(sourceFiles(t, d)), 2)
	loads(t, d, newSource("podnet", "10.0.0.0/8"))
	l := lock(t, d)
	ok(t, l.Tidy())
	same(t, len(sourceFiles(t, d)), 1)
	absent(t, d.Path()+"/record.json.x.tmp")
	loads(t, d, newSource("podnet", "10.0.0.0/8"))
}

// TestNewDirsAreRemoved: the process that makes the dataDir removes what killed ones left that were about to.
func TestNewDirsAreRemoved(t *testing.T) {
	d := open(t)
	above := filepath.Dir(d.Path())
	for _, name := range []string{".ip-masq-data.1.tmp", ".ip-masq-data.2.tmp", ".ip-masq-data.3.tmp", "ip-masq-data.4.tmp"} {
		ok(t, os.Mkdir(filepath.Join(above, name), 0o700))
	}
	ok(t, os.WriteFile(filepath.Join(above, ".ip-masq-data.2.tmp", "made-by-ip-masq"), nil, 0o600))
	ok(t, os.WriteFile(filepath.Join(above, ".ip-masq-data.3.tmp", "note"), nil, 0o600))
	ok(t, d.Attach(aPod("podnet", "c", "eth0")))
	var names []string
	for _, e := range assert.Must(os.ReadDir(above))(t) {
		names = append(names, e.Name())
	}
	same(t, names, []string{".ip-masq-data.3.tmp", "ip-masq-data.4.tmp", filepath.Base(d.Path())})
}

// A document that is dropped is out of force at once, and comes back unless that is committed: by UndoDrop, with
// the end of the lock, or when its holder was killed, for readers at once, and to its name with the next lock.
func TestDropIsUndoneUnlessCommitted(t *testing.T) {
	for name, undo := range map[string]func(*testing.T, *store.Dir){
		"discarded": func(t *testing.T, d *store.Dir) {
			l := lock(t, d)
			ok(t, l.Drop(network("net")))
			loads(t, d, newSource("other"))
			ok(t, l.UndoDrop(network("net")))
		},
		"released": func(t *testing.T, d *store.Dir) {
			l := lock(t, d)
			ok(t, l.Drop(network("net")))
			ok(t, l.Release())
		},
		"killed": func(t *testing.T, d *store.Dir) {
			if err := child(t, "killed while it drops", d).Run(); err == nil || !strings.Contains(err.Error(), "killed") {
				t.Fatalf("got %v", err)
			}
			left := sourceFiles(t, d)
			loads(t, d, newSource("net"), newSource("other"))
			reading := assert.Must(d.LockToRead(t.Context()))(t)
			loads(t, d, newSource("net"), newSource("other"))
			ok(t, reading.Release())
			same(t, sourceFiles(t, d), left)
			lock(t, d)
		},
		"of another process": func(t *testing.T, d *store.Dir) {
			other := store.Open(d.Path()).WithBoot(boot)
			l := lock(t, other)
			ok(t, l.Drop(network("net")))
			loads(t, d, newSource("other"))
			ok(t, l.Release())
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := open(t)
			document(t, d, newSource("net"))
			document(t, d, newSource("other"))
			ok(t, d.PutVerificationCache(network("net"), store.VerificationCache{Inputs: "i", Entry: "e", Generation: "m"}))
			before := sourceFiles(t, d)
			undo(t, d)
			loads(t, d, newSource("net"), newSource("other"))
			same(t, sourceFiles(t, d), before)
		})
	}
	d := open(t)
	document(t, d, newSource("net", "10.0.0.0/8"))
	if err := child(t, "killed while it drops", d).Run(); err == nil {
		t.Fatal("not killed")
	}
	ok(t, os.WriteFile(d.DocumentPath(network("net")), nil, 0o600)) // as a program writes it that knows nothing of that
	lock(t, d)
	same(t, len(sourceFiles(t, d)), 1)
	same(t, len(load(t, d).Unreadable), 1)
}

// The only copy of a document stays while it is not known whether there is another one.
func TestDroppedDocumentBesideSomethingElse(t *testing.T) {
	d := open(t)
	document(t, d, newSource("net", "10.0.0.0/8"))
	if err := child(t, "killed while it drops", d).Run(); err == nil {
		t.Fatal("not killed")
	}
	path := d.DocumentPath(network("net"))
	ok(t, os.Mkdir(path, 0o700)) // neither a document nor absent
	ok(t, lock(t, d).Release())
	ok(t, os.Remove(path))
	ok(t, lock(t, d).Release())
	loads(t, d, newSource("net", "10.0.0.0/8"))
}

func fileOf(t *testing.T, d *store.Dir, name string) string {
	t.Helper()
	for _, f := range sourceFiles(t, d) {
		data := assert.Must(os.ReadFile(f))(t)
		if strings.Contains(string(data), `"`+name+`"`) {
			return f
		}
	}
	t.Fatalf("no document of %s", name)
	return ""
}

// Of two documents there is always at least one, so that is what a reader must
// find: one that goes after it was listed is no reason to miss the other.
func TestLoadMissesNothingThatReplacesAnother(t *testing.T) {
	d := open(t)
	ok(t, os.Mkdir(d.Path(), 0o700))
	inMountNamespace(t, "alternate", d)
}
