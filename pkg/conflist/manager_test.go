// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// managed is a Manager at work on real files, in a bubble whose time is its own.
type managed struct {
	*Manager
	t       *testing.T
	dir     string // of all files; those of the runtimes are in net.d
	changed chan struct{}
	leader  atomic.Bool
	wrote   func() // called when the entry was put in
	stop    func()

	// As of the last time that the test waited.
	last   Status
	writes int
	log    string

	mu  sync.Mutex
	now struct {
		last   Status
		writes int
		log    bytes.Buffer
	}
}

// Write takes the log.
func (k *managed) Write(line []byte) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.now.log.Write(line)
}

func (k *managed) take(s Status) {
	k.mu.Lock()
	k.now.last = s
	if s.Wrote {
		k.now.writes++
	}
	k.mu.Unlock()
	if s.Wrote {
		k.signal()
		k.wrote()
	}
}

// wait waits until the Manager has nothing to do at this time.
func (k *managed) wait() {
	synctest.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.last, k.writes, k.log = k.now.last, k.now.writes, k.now.log.String()
}

// keep starts a Manager with a plugin and no network.
func keep(t *testing.T, change func(*managed)) *managed {
	k := &managed{t: t, dir: t.TempDir(), changed: make(chan struct{}, 1), wrote: func() {}}
	k.leader.Store(true)
	k.write("bin/ip-masq", "x")
	if err := os.Chmod(k.path("bin/ip-masq"), 0o755); err != nil {
		t.Fatal(err)
	}
	o := Options{
		Editor: Editor{Dir: k.path("net.d"), Backups: in(k.path("backups"))}, ReadEntry: func() ([]byte, error) { return ReadEntry(k.path("entry.json")) }, BinDir: k.path("bin"),
		Changed: k.changed, Interval: 30 * time.Second, Leader: k.leader.Load,
		Log: slog.New(slog.NewTextHandler(k, nil)), Report: k.take,
	}
	k.Manager = NewManager(o)
	if change != nil {
		change(k)
	}
	select {
	case <-k.changed: // what is there from the beginning is no change
	default:
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); k.Run(ctx) }()
	k.stop = func() { cancel(); <-ended }
	t.Cleanup(func() {
		k.stop()
		k.wait()
		if t.Failed() {
			t.Log(k.log)
		}
	})
	k.wait()
	return k
}

func (k *managed) path(name string) string { return filepath.Join(k.dir, name) }

func (k *managed) signal() {
	select {
	case k.changed <- struct{}{}:
	default:
	}
}

// write writes a file at once and whole, and signals the change.
func (k *managed) write(name, text string) {
	k.t.Helper()
	path := k.path(name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path+".next", []byte(text), 0o644),
		os.Rename(path+".next", path)); err != nil {
		k.t.Fatal(err)
	}
	k.signal()
}

func (k *managed) remove(name string) {
	k.t.Helper()
	if err := os.RemoveAll(k.path(name)); err != nil {
		k.t.Fatal(err)
	}
	k.signal()
}

// lock locks a directory until the returned function is called.
func (k *managed) lock(name string) func() {
	k.t.Helper()
	dir, err := os.Open(k.path(name))
	if err != nil {
		k.t.Fatal(err)
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		k.t.Fatal(err)
	}
	return func() {
		if err := dir.Close(); err != nil {
			k.t.Fatal(err)
		}
	}
}

// present reports whether a file has the plugin entry.
func (k *managed) present(name string) bool {
	doc, err := os.ReadFile(k.path(name))
	return err == nil && bytes.Contains(doc, []byte(`"ip-masq"`))
}

// after lets time go by.
func (k *managed) after(d time.Duration) {
	time.Sleep(d)
	k.wait()
}

// says fails the test unless there are these problems, and no more.
func (k *managed) says(want ...string) {
	k.t.Helper()
	if len(k.last.Problems) != len(want) {
		k.t.Fatalf("problems %v, want %q", k.last.Problems, want)
	}
	for i, p := range k.last.Problems {
		for piece := range strings.SplitSeq(want[i], "*") {
			if !strings.Contains(p.Err.Error(), piece) {
				k.t.Errorf("%q does not say %q", p.Err, piece)
			}
		}
	}
}

// logged fails the test unless the log says something so often.
func (k *managed) logged(n int, text string) {
	k.t.Helper()
	if got := strings.Count(k.log, text); got != n {
		k.t.Errorf("%q is in the log %d times, want %d:\n%s", text, got, n, k.log)
	}
}

const aList = "net.d/10-a.conflist"

func TestManagerWaitsForANetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.says("waiting for the main CNI plugin's network in " + k.path("net.d"))
		k.after(time.Hour)
		k.logged(1, "level=INFO msg=\"waiting for the conflist\" reason=conflist err=")
		k.logged(0, "level=ERROR")
		k.write("net.d/10-x.conf", "{") // half of it; the next moment it is whole
		k.after(20 * time.Millisecond)
		k.write("net.d/10-x.conf", single)
		k.after(60 * time.Millisecond)
		k.says()
		if !k.last.Present || !k.present("net.d/10-x-made-by-ip-masq.conflist") {
			t.Error(k.last)
		}
		k.logged(1, "inserted the plugin entry")
		k.logged(2, "level=")
		k.remove("net.d") // uninstalled
		k.after(60 * time.Millisecond)
		if k.says("waiting for"); k.last.Present || k.last.Flapping {
			t.Error(k.last)
		}
		k.write(aList, listNamed("a"))
		k.after(60 * time.Millisecond)
		if k.says(); !k.present(aList) || k.writes != 2 {
			t.Error("it is not back")
		}
	})
}

func TestManagerIdles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.write(aList, listWith("a", bareEntry))
		k.after(time.Minute)
		info, err := os.Stat(k.path(aList))
		if err != nil {
			t.Fatal(err)
		}
		log := len(k.log)
		for range 100 {
			k.signal() // other files come and go
			k.after(time.Minute)
		}
		now, err := os.Stat(k.path(aList))
		if err != nil || !os.SameFile(info, now) || len(k.log) != log || k.writes != 0 {
			t.Error("it is not idle", err, k.writes)
		}
	})
}

func TestManagerWithoutPlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.remove("bin")
		k.write(aList, listNamed("a"))
		k.after(time.Second)
		if k.says(k.path("bin/ip-masq") + " is missing*ip-masq-reconciler install"); k.present(aList) || k.last.Present {
			t.Error("pods cannot start now")
		}
		k.write("bin/ip-masq", "x")
		k.after(time.Second)
		k.says("is not executable (mode 0644)")
		if err := os.Chmod(k.path("bin/ip-masq"), 0o755); err != nil {
			t.Fatal(err)
		}
		k.signal()
		k.after(60 * time.Millisecond)
		if k.says(); !k.present(aList) {
			t.Error("the entry is not there")
		}
		k.remove("bin")
		k.after(60 * time.Millisecond)
		if k.says(); !k.present(aList) { // the reconcile loop reports the plugin
			t.Error("the entry was taken out")
		}
		k.logged(2, "level=ERROR")
	})
}

func TestManagerEntryFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, func(k *managed) { k.write("entry.json", `{"type":"ip-masq","cidrLimit":0}`) })
		k.write(aList, listNamed("a"))
		k.after(time.Second)
		if k.says(k.path("entry.json") + "*cidrLimit*none is inserted"); k.present(aList) {
			t.Error("a bad entry was inserted")
		}
		k.write("entry.json", `{"type":"ip-masq","cidrLimit":7}`)
		k.after(60 * time.Millisecond)
		k.says()
		k.write("entry.json", `{"type":"bridge"}`)
		k.write(aList, listNamed("a"))
		k.after(60 * time.Millisecond)
		k.says("type: must be*the last good one is inserted")
		if doc, err := os.ReadFile(k.path(aList)); err != nil || !strings.Contains(string(doc), `"cidrLimit":7`) {
			t.Errorf("not the last good one: %v %s", err, doc)
		}
		k.remove("entry.json")
		k.after(60 * time.Millisecond)
		k.says()
		if doc, err := os.ReadFile(k.path(aList)); err != nil || !strings.Contains(string(doc), `"cidrLimit":7`) {
			t.Errorf("what is there already is changed: %v %s", err, doc)
		}
		k.write(aList, listNamed("a"))
		k.after(60 * time.Millisecond)
		if doc, err := os.ReadFile(k.path(aList)); err != nil || strings.Contains(string(doc), "cidrLimit") || !k.present(aList) {
			t.Errorf("not the default: %v %s", err, doc)
		}
	})
}

func TestManagerStandsBy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, func(k *managed) { k.leader.Store(false) })
		k.write(aList, listNamed("a"))
		k.after(time.Hour)
		if k.says(); k.present(aList) || k.last.Leader || len(k.log) > 0 {
			t.Error("it does not stand by")
		}
		k.leader.Store(true)
		k.SyncNow()
		k.wait()
		if k.says(); !k.last.Leader || !k.present(aList) {
			t.Error("it does not take over")
		}
	})
}

func TestManagerNeverWritesFromWhatIsBroken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.write(aList, listNamed("a"))
		k.after(time.Second)
		const broken = `{"name":"a","cniVersion":"1.0.0","plugins":[{"type":"bridge"},]}`
		k.write(aList, broken)
		k.after(time.Minute)
		k.says("10-a.conflist*column 63")
		if doc, err := os.ReadFile(k.path(aList)); err != nil || string(doc) != broken || k.last.Present {
			t.Errorf("%v %s", err, doc)
		}
		k.write(aList, listNamed("a"))
		k.after(60 * time.Millisecond)
		if k.says(); !k.present(aList) {
			t.Error("the file loads again, and has no entry")
		}
	})
}

func TestManagerNamesItsNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, func(k *managed) { k.options.Network = "b" })
		k.write(aList, listNamed("a"))
		k.write("net.d/20-b.conflist.cilium_bak", listNamed("b"))
		k.after(time.Second)
		k.says("waiting for the main CNI plugin's network b*20-b.conflist.cilium_bak*cni.exclusive=false")
		k.remove("net.d/20-b.conflist.cilium_bak")
		k.after(time.Second)
		k.says("waiting for the main CNI plugin's network b*--conflist-network")
		k.write("net.d/20-b.conflist", listNamed("b"))
		k.after(60 * time.Millisecond)
		if k.says(); k.present(aList) || !k.present("net.d/20-b.conflist") {
			t.Error("not in the named network")
		}
	})
}

func TestManagerTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		if err := os.MkdirAll(k.path("net.d"), 0o755); err != nil {
			t.Fatal(err)
		}
		unlock := k.lock("net.d")
		k.write(aList, listNamed("a"))
		k.after(lockTimeout + time.Second)
		k.says("another process holds the lock")
		unlock()
		k.after(30 * time.Second)
		if k.says(); !k.present(aList) {
			t.Error("it is not tried again")
		}
	})
}

// TestManagerEndsWhileItWaits: whatever keeps a directory locked, a stop is at once.
func TestManagerEndsWhileItWaits(t *testing.T) {
	for _, dir := range []string{"net.d", "backups"} {
		synctest.Test(t, func(t *testing.T) {
			k := keep(t, func(k *managed) {
				if err := errors.Join(os.Mkdir(k.path("net.d"), 0o755), os.Mkdir(k.path("backups"), 0o700)); err != nil {
					t.Fatal(err)
				}
			})
			defer k.lock(dir)()
			k.write(aList, listNamed("a"))
			k.after(time.Second)
			start := time.Now()
			if k.stop(); time.Since(start) > time.Second/10 {
				t.Error(dir, "is waited for", time.Since(start))
			}
			if k.present(aList) {
				t.Error(dir, "has the entry now")
			}
		})
	}
}

// TestManagerDoesNotNeedBackups: where none can be kept the entry comes all the
// same, and the log says so.
func TestManagerDoesNotNeedBackups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, func(k *managed) { k.write("backups", "a file in its place") })
		for range 3 {
			k.write(aList, listNamed("a"))
			k.after(time.Second)
		}
		if k.says(); !k.present(aList) || k.writes != 3 {
			t.Error(k.writes)
		}
		k.logged(1, "no backup of the conflist was kept")
	})
}

func TestManagerToleratesOneEntryAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.write(aList, listWith("a", bareEntry, `{"type":"portmap"}`, bareEntry))
		k.after(60 * time.Millisecond)
		doc, err := os.ReadFile(k.path(aList))
		if k.says(); err != nil || strings.Count(string(doc), `"ip-masq"`) != 1 || !k.last.Present {
			t.Errorf("%v %s", err, doc)
		}
		k.logged(1, "removed duplicate plugin entries")
		k.write("net.d/00-b.conflist", `{"name":"n","cniVersion":"1.1.0"}`)
		k.write("net.d/n/1.conf", single)
		k.after(60 * time.Millisecond)
		if k.says("00-b.conflist*directory of"); k.last.Present {
			t.Error(k.last)
		}
	})
}

// TestManagerFollowsAConf: the main CNI plugin changes the file that the list was
// made of.
func TestManagerFollowsAConf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.write("net.d/10-x.conf", single)
		k.after(time.Second)
		k.write("net.d/10-x.conf", `{"cniVersion":"1.0.0","name":"one","type":"ptp","mtu":9000}`)
		k.after(60 * time.Millisecond)
		doc, err := os.ReadFile(k.path("net.d/10-x-made-by-ip-masq.conflist"))
		if k.says(); err != nil || !strings.Contains(string(doc), "9000") || k.last.Flapping {
			t.Errorf("%v %s", err, doc)
		}
		k.logged(1, "updated the generated conflist")
		k.remove("net.d/10-x.conf")
		k.after(60 * time.Millisecond)
		if _, err := os.Stat(k.path("net.d/10-x-made-by-ip-masq.conflist")); !os.IsNotExist(err) {
			t.Error("it stands for a network that is gone", err)
		}
		k.says("waiting for")
	})
}

func TestRemovals(t *testing.T) {
	times := func(n int, d time.Duration) []time.Duration { return slices.Repeat([]time.Duration{d}, n) }
	const second = time.Second
	for _, c := range []struct {
		name     string
		lives    []time.Duration // of the entry until it is removed, inserted again as soon as that is allowed
		flapping bool
		pause    time.Duration // before the last one
	}{
		{name: "nine at once", lives: times(9, 0)},
		{name: "ten at once", lives: times(10, 0), flapping: true},
		{name: "ten at once after a day", lives: append([]time.Duration{24 * time.Hour}, times(10, 0)...), flapping: true},
		{name: "five after a long life each", lives: times(5, 14*second), flapping: true},
		{name: "four a minute apart", lives: times(4, time.Minute)},
		{name: "each two minutes", lives: times(20, 2*time.Minute), flapping: true},
		{name: "each three minutes", lives: times(20, 3*time.Minute)},
		{name: "each half a minute, for hours", lives: times(1000, 30*second), flapping: true},
		{name: "59 at once", lives: times(59, 0), flapping: true},
		{name: "60 at once", lives: times(60, 0), flapping: true, pause: second},
		{name: "63 at once", lives: times(63, 0), flapping: true, pause: 8 * second},
		{name: "70 at once", lives: times(70, 0), flapping: true, pause: time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, now := newRemovals(), time.Now()
			active := func() bool { return r.quickRemovals.Active(now) != "" || r.lateRemovals.Active(now) != "" }
			for _, lived := range c.lives {
				r.observe(true, now)
				now = now.Add(lived)
				r.observe(false, now)
				r.observe(false, now.Add(time.Millisecond)) // it is counted once
				if at := r.insertAt(); at.After(now) {
					now = at
				}
			}
			if active() != c.flapping || r.quickRemovals.Pause() != c.pause {
				t.Errorf("flapping %t, pause %s", active(), r.quickRemovals.Pause())
			}
			r.observe(true, now)
			if now = now.Add(5*time.Minute + 1); active() || r.quickRemovals.Pause() != 0 {
				t.Error("it does not end")
			}
		})
	}
}

func TestLikelyWriter(t *testing.T) {
	for _, c := range []struct{ file, doc, who, remedy string }{
		{"05-cilium.conflist", listNamed("cilium"), "Cilium", "cni.exclusive=false"},
		{"10-x.conflist", `{"name":"x","cniVersion":"1.0.0","plugins":[{"type":"cilium-cni"}]}`, "Cilium", "cni.exclusive=false"},
		{"10-kindnet.conflist", listNamed("kindnet"), "kindnet", "compiled in"},
		{"10-calico.conflist", listNamed("k8s-pod-network"), "Calico", "cni_network_config"},
		{"10-flannel.conflist", `{"name":"cbr0","cniVersion":"1.0.0","plugins":[{"type":"flannel"}]}`, "flannel", "kube-flannel-cfg"},
		{"10-bridge.conflist", listNamed("bridge"), "main CNI plugin", "write the plugin entry too"},
		{"10-broken.conflist", "{", "main CNI plugin", "write the plugin entry too"},
	} {
		dir := dirWith(t, map[string]string{c.file: c.doc})
		list, _ := config.ParseConflist(filepath.Join(dir, c.file), []byte(c.doc)) // one of them is broken
		if p := likelyWriter(Network{Path: list.File, Name: "x", Conflist: list}); !strings.Contains(p.name, c.who) || !strings.Contains(p.remedy, c.remedy) {
			t.Errorf("%s: %+v", c.file, p)
		}
	}
	dir := dirWith(t, map[string]string{"10-bridge.conflist": listNamed("bridge"), "20-y.conflist.cilium_bak": ""})
	if p := likelyWriter(Network{Path: dir + "/10-bridge.conflist"}); p.name != "Cilium" {
		t.Error(p)
	}
}

// TestManagerFiftyRewrites: the main CNI plugin rewrites its file as soon as
// the entry is there.
func TestManagerFiftyRewrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.write(aList, listNamed("a"))
		k.after(time.Second)
		for i := range 50 {
			k.write(aList, listNamed("a"))
			start := time.Now()
			for !k.present(aList) {
				k.after(time.Millisecond)
			}
			if took := time.Since(start); took > 500*time.Millisecond {
				t.Errorf("rewrite %d: back after %s", i+1, took)
			}
		}
		if k.writes != 51 {
			t.Errorf("%d writes for 50 rewrites and the first", k.writes)
		}
		if !k.last.Flapping {
			t.Error("50 in a row are nothing to report")
		}
		k.logged(1, "inserted the plugin entry")
		k.logged(1, "restored the plugin entry")
		k.logged(1, "level=ERROR")
		k.after(11 * time.Second)
		if k.says(); k.last.Flapping {
			t.Error("it is not over")
		}
		k.logged(1, "the conflist has the plugin entry, and no problems any more")
	})
}

// TestManagerFlappingAfterALongLife: how long the entry lived in peace says nothing
// about the flapping that follows.
func TestManagerFlappingAfterALongLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.write(aList, listNamed("a"))
		k.after(24 * time.Hour)
		for range 12 {
			k.write(aList, listNamed("a"))
			for !k.present(aList) {
				k.after(time.Millisecond)
			}
		}
		k.after(time.Second)
		if k.says("removed repeatedly"); !k.last.Flapping {
			t.Error("12 in a row are nothing to report")
		}
		k.after(10 * time.Second)
		if k.says(); k.last.Flapping {
			t.Error("it is not over")
		}
	})
}

func TestManagerFlapping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var active atomic.Bool
		k := keep(t, func(k *managed) {
			k.wrote = func() {
				if active.Load() {
					time.AfterFunc(time.Millisecond, func() { k.write("net.d/10-kindnet.conflist", listNamed("kindnet")) })
				}
			}
		})
		active.Store(true)
		k.write("net.d/10-kindnet.conflist", listNamed("kindnet"))
		k.after(2 * time.Second)
		k.says("kindnet.conflist*removed repeatedly*kindnet*inserted again at once*compiled in")
		if !k.last.Flapping {
			t.Error(k.last)
		}
		k.after(time.Minute)
		before := k.writes
		k.after(10 * time.Minute)
		if n := k.writes - before; n > 12 || n < 9 {
			t.Errorf("%d writes in ten minutes", n)
		}
		if k.says("*inserted again after 1m0s now"); k.last.Present {
			t.Error("it is not there while it is waited")
		}
		k.logged(1, "level=ERROR")
		active.Store(false)
		k.after(2*time.Minute + time.Second)
		if k.says(); k.last.Flapping || !k.last.Present {
			t.Error("it is not over")
		}
		if n := strings.Count(k.log, "\n"); n > 5 {
			t.Errorf("%d lines of log", n)
		}
		k.write("net.d/10-kindnet.conflist", listNamed("kindnet"))
		k.after(60 * time.Millisecond)
		if !k.last.Present {
			t.Error("the next one is not repaired at once")
		}
	})
}

func TestManagerSlowRewriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		for i := range 100 {
			k.write(aList, listNamed("a"))
			if k.after(60 * time.Millisecond); !k.last.Present {
				t.Fatalf("rewrite %d is not repaired at once", i)
			}
			k.after(30 * time.Second)
		}
		k.says("removed repeatedly*inserted again at once")
		k.logged(1, "level=ERROR")
		k.after(5 * time.Minute)
		k.says()
	})
}
