// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func attachments(t *testing.T, d *store.Dir, network string, want int) time.Time {
	t.Helper()
	n, changed, err := d.Attachments(network)
	if n != want || err != nil {
		t.Errorf("%s has %d attachments, want %d (%v)", network, n, want, err)
	}
	return changed
}

func TestAttachAndDetach(t *testing.T) {
	d := open(t)
	for range 2 { // twice is fine
		ok(t, d.Attach(aPod("net", "c1", "eth0")))
	}
	ok(t, d.Attach(aPod("net", "c1", "eth1")))
	ok(t, d.Attach(aPod("net", "c2", "eth0")))
	ok(t, d.Attach(aPod("web", "c1", "eth0")))
	attachments(t, d, "net", 3)
	attachments(t, d, "web", 1)
	for range 2 {
		ok(t, d.Detach(aPod("net", "c1", "eth0").Attachment))
	}
	ok(t, d.Detach(aPod("net", "c9", "eth0").Attachment))
	attachments(t, d, "net", 2)
	attachments(t, d, "web", 1)

	ok(t, d.Prune("net", []store.Attachment{{ContainerID: "c2", IfName: "eth0"}, {ContainerID: "c3", IfName: "eth0"}}))
	attachments(t, d, "net", 1)
	ok(t, d.Detach(aPod("net", "c2", "eth0").Attachment))
	attachments(t, d, "net", 0)
	ok(t, d.Prune("web", nil))
	attachments(t, d, "web", 0)
	absent(t, d.Path()+"/sources")
	absent(t, d.Path()+"/lock")
}

func TestAttachmentsTellWhenTheyChanged(t *testing.T) {
	d := open(t)
	before := time.Now().Add(-time.Second)
	ok(t, d.Attach(aPod("net", "c1", "eth0")))
	first := attachments(t, d, "net", 1)
	if first.Before(before) || first.After(time.Now().Add(time.Second)) {
		t.Errorf("changed at %v", first)
	}
	time.Sleep(30 * time.Millisecond) // longer than the kernel's tick
	ok(t, d.Detach(aPod("net", "c2", "eth0").Attachment))
	ok(t, d.Attach(aPod("web", "c1", "eth0")))
	if again := attachments(t, d, "net", 1); !again.Equal(first) {
		t.Errorf("nothing changed, yet %v became %v", first, again)
	}
	ok(t, d.Detach(aPod("net", "c1", "eth0").Attachment))
	if last := attachments(t, d, "net", 0); !last.After(first) {
		t.Errorf("Detach left %v as %v", first, last)
	}
}

func TestAttachmentsOfAnEarlierBoot(t *testing.T) {
	d := open(t)
	ok(t, d.Attach(aPod("net", "c1", "eth0")))
	next := store.Open(d.Path()).WithBoot(another)
	attachments(t, next, "net", 0)
	ok(t, next.Detach(aPod("net", "c1", "eth0").Attachment))
	ok(t, next.Prune("net", nil))
	attachments(t, d, "net", 1)
	ok(t, next.Attach(aPod("net", "c2", "eth0")))

	ok(t, lock(t, next).Tidy())
	absent(t, d.Path()+"/attachments/"+boot)
	attachments(t, next, "net", 1)
	attachments(t, d, "net", 0)
}

func TestBoot(t *testing.T) {
	text := assert.Must(os.ReadFile("/proc/sys/kernel/random/boot_id"))(t)
	if id := store.Open("/x").Boot(); id+"\n" != string(text) {
		t.Errorf("%q, want %q", id, text)
	}
	same(t, open(t).Boot(), boot)
	for _, id := range []string{"", "..", "a/b", "a b"} {
		d := store.Open(t.TempDir()).WithBoot(id)
		fails(t, d.Attach(aPod("net", "c", "eth0")), "boot id", "UUID")
		fails(t, lock(t, d).Tidy(), "boot id")
		same(t, d.Boot(), "")
	}
}

// A directory that goes away under an Attach is made again.
func TestAttachWhileItsBootIsDropped(t *testing.T) {
	d := open(t)
	other := store.Open(d.Path()).WithBoot(another)
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			l, err := d.Lock(t.Context())
			if err == nil {
				err = errors.Join(l.Tidy(), l.Release())
			}
			if err != nil {
				stopped <- err
				return
			}
		}
	}()
	for i := range 300 {
		if err := other.Attach(aPod("net", fmt.Sprint(i), "eth0")); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	ok(t, <-stopped)
}

func TestTakeAddressesBesideDEL(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	p := aPod("net", "c1", "eth0")
	p.Addresses = []netip.Addr{netip.MustParseAddr("10.1.0.5"), netip.MustParseAddr("10.1.0.6")}
	taken := map[store.Attachment][]netip.Addr{p.Attachment: p.Addresses[:1]}
	ok(t, d.Attach(p))
	ok(t, l.TakeAddresses(taken))
	if got, err := d.Pod(p.Attachment); err != nil || !slices.Equal(got.Addresses, p.Addresses[1:]) {
		t.Errorf("%+v, %v", got, err)
	}
	for range 500 { // DEL takes no lock
		ok(t, d.Attach(p))
		var both sync.WaitGroup
		both.Go(func() { ok(t, l.TakeAddresses(taken)) })
		both.Go(func() { ok(t, d.Detach(p.Attachment)) })
		both.Wait()
		attachments(t, d, "net", 0)
	}
}

// TestCachedAttachments: a record from the runtime's cache counts until there is one of an ADD, and goes with
// its attachment.
func TestCachedAttachments(t *testing.T) {
	d := open(t)
	a := store.Attachment{Network: "net", ContainerID: "c", IfName: "eth0"}
	cached := store.Pod{Attachment: a, At: 5, Namespace: "prod", Name: "web-0", Addresses: []netip.Addr{netip.MustParseAddr("10.1.0.5")}, Cached: true}
	added := store.Pod{Attachment: a, Namespace: "dev"}
	has := func(what string, want ...store.Pod) {
		t.Helper()
		pods, without, err := d.Pods()
		ok(t, err)
		n, _, err := d.Attachments("net")
		ok(t, err)
		one, err := d.Pod(a)
		ok(t, err)
		if len(pods) != len(want) || without != 0 || n != len(want) || (one != nil) != (len(want) > 0) {
			t.Fatalf("%s: %+v, %d without, %d attachments, %+v", what, pods, without, n, one)
		}
		for i := range want {
			pods[i].At, one.At = want[i].At, want[i].At
			same(t, pods[i], want[i])
			same(t, *one, want[i])
		}
	}
	record := func(want bool) {
		t.Helper()
		recorded, err := d.AttachCached(cached)
		if ok(t, err); recorded != want {
			t.Errorf("recorded: %t", recorded)
		}
	}
	record(true)
	has("cached", cached)
	other := cached
	other.Addresses = nil
	recorded, err := d.AttachCached(other)
	if ok(t, err); !recorded {
		t.Error("not replaced by another cached one")
	}
	has("replaced", other)
	record(true)
	has("replaced again", cached)
	l := lock(t, d)
	ok(t, l.TakeAddresses(map[store.Attachment][]netip.Addr{a: cached.Addresses}))
	has("without its address", other)
	ok(t, d.Attach(added))
	record(false)
	has("its ADD", added)
	ok(t, d.DetachCached(a))
	has("its ADD alone", added)
	ok(t, d.Detach(a))
	has("its DEL")
	ok(t, d.Attach(added)) // and the disk was full
	torn, err := filepath.Glob(filepath.Join(d.Path(), "attachments", "*", "*", "*"))
	if ok(t, err); len(torn) != 1 {
		t.Fatalf("%q", torn)
	}
	ok(t, os.Truncate(torn[0], 0))
	record(true)
	has("beside a torn one", cached)
	ok(t, d.Attach(added))
	has("its ADD again", added)
	ok(t, d.Detach(a))
	for what, end := range map[string]func() error{
		"DEL":          func() error { return d.Detach(a) },
		"GC":           func() error { return d.Prune("net", nil) },
		"no file":      func() error { return d.DetachCached(a) },
		"ADD, and DEL": func() error { return errors.Join(d.Attach(added), d.Detach(a)) },
	} {
		record(true)
		ok(t, d.Prune("net", []store.Attachment{a}))
		has("GC that keeps it", cached)
		ok(t, end())
		has(what)
	}
	record(true)
	cachedFiles := assert.Must(filepath.Glob(filepath.Join(d.Path(), "attachments", "*", "*", "*.cached")))(t)
	ok(t, os.WriteFile(cachedFiles[0]+".1a.tmp", nil, 0o600)) // by a process that was killed
	has("beside a temporary file", cached)
	ok(t, l.Destroy())
	absent(t, d.Path())
}
