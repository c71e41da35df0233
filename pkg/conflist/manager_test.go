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
	"testing"
	"testing/synctest"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// managed is a Manager with real files, in a bubble whose time is its own.
type managed struct {
	*Manager
	t      *testing.T
	dir    string // of all files; those of the runtimes are in net.d
	last   Status // of the last sync
	writes int
	log    bytes.Buffer
}

// manage returns a Manager with a plugin and no network.
func manage(t *testing.T) *managed {
	k := &managed{t: t, dir: t.TempDir()}
	k.write("bin/ip-masq", "x")
	k.mode("bin/ip-masq", 0o755)
	k.Manager = &Manager{
		Editor: Editor{Dir: k.path("net.d"), Backups: in(k.path("backups")), RecordPath: k.path("backups/conflists.json"), CopyRecord: k.path("backups/own-conflist.json")},
		ReadEntry: func() ([]byte, bool, error) {
			if _, err := os.Stat(k.path("entry.json")); os.IsNotExist(err) {
				return []byte(`{"type":"ip-masq"}`), false, nil
			}
			entry, err := ReadEntry(k.path("entry.json"))
			return entry, true, err
		},
		BinDir: k.path("bin"), Log: slog.New(slog.NewTextHandler(&k.log, nil)),
	}
	return k
}

// sync fails the test unless there are these problems, and no more.
func (k *managed) sync(want ...string) {
	k.t.Helper()
	k.last = k.Sync(k.t.Context())
	k.writes += k.last.Inserted
	if len(k.last.Problems) != len(want) {
		k.t.Fatalf("problems %v, want %q", k.last.Problems, want)
	}
	for i, p := range k.last.Problems {
		assert.ErrorContains(k.t, p.Err, strings.Split(want[i], "*")...)
	}
}

// after lets time pass, and syncs.
func (k *managed) after(d time.Duration, want ...string) {
	k.t.Helper()
	time.Sleep(d)
	k.sync(want...)
}

func (k *managed) mode(name string, mode os.FileMode) {
	k.t.Helper()
	assert.NoError(k.t, os.Chmod(k.path(name), mode))
}

func (k *managed) path(name string) string { return filepath.Join(k.dir, name) }

// write writes a file at once and whole.
func (k *managed) write(name, text string) {
	k.t.Helper()
	path := k.path(name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path+".next", []byte(text), 0o644),
		os.Rename(path+".next", path)); err != nil {
		k.t.Fatal(err)
	}
}

func (k *managed) remove(name string) {
	k.t.Helper()
	assert.NoError(k.t, os.RemoveAll(k.path(name)))
}

// lock locks the directory of the runtimes, as another process does, until the returned function is called.
func (k *managed) lock() func() {
	k.t.Helper()
	dir := assert.Must(safefile.OpenLocked(k.t.Context(), k.Dir, time.Minute))(k.t)
	return func() {
		assert.NoError(k.t, dir.Close())
	}
}

// present reports whether a file has the plugin entry.
func (k *managed) present(name string) bool {
	doc, err := os.ReadFile(k.path(name))
	return err == nil && bytes.Contains(doc, []byte(`"ip-masq"`))
}

// logged fails the test unless the log says something so often.
func (k *managed) logged(n int, text string) {
	k.t.Helper()
	if got := strings.Count(k.log.String(), text); got != n {
		k.t.Errorf("%q is in the log %d times, want %d:\n%s", text, got, n, &k.log)
	}
}

const aList = "net.d/10-a.conflist"

func TestManagerWaitsForANetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.sync("waiting for the main CNI plugin's network: find the network in " + k.path("net.d"))
		if !k.last.Problems[0].Waiting || !k.last.Next.IsZero() {
			t.Errorf("%+v", k.last)
		}
		k.write("net.d/10-x.conf", single)
		k.sync()
		if !k.last.Present || !k.present("net.d/10-x-made-by-ip-masq.conflist") {
			t.Error(k.last)
		}
		k.logged(1, "inserted the plugin entry")
		k.remove("net.d") // uninstalled
		if k.sync("waiting for"); k.last.Present || k.last.Flapping {
			t.Error(k.last)
		}
		k.write(aList, listNamed("a"))
		if k.after(minWait); !k.present(aList) || k.writes != 2 {
			t.Error("it is not back")
		}
		k.logged(2, "level=")
	})
}

func TestManagerWithoutPlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.remove("bin")
		k.write(aList, listNamed("a"))
		k.sync(k.path("bin/ip-masq") + " is missing*ip-masq-reconciler install")
		if k.present(aList) || k.last.Present || k.last.Problems[0].Reason != "plugin" {
			t.Error("pods cannot start now")
		}
		k.write("bin/ip-masq", "x")
		k.sync("is not executable (mode 0644)")
		k.mode("bin/ip-masq", 0o755)
		if k.sync(); !k.present(aList) {
			t.Error("the entry is not there")
		}
		k.remove("bin")
		if k.sync(); !k.present(aList) { // the reconcile loop reports the plugin
			t.Error("the entry was taken out")
		}
	})
}

func TestManagerEntryFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		has := func(what, text string) {
			t.Helper()
			if doc, err := os.ReadFile(k.path(aList)); err != nil || !strings.Contains(string(doc), text) {
				t.Errorf("not %s: %v %s", what, err, doc)
			}
		}
		k.write("entry.json", `{"type":"ip-masq","cidrLimit":0}`)
		k.write(aList, listNamed("a"))
		if k.sync(k.path("entry.json") + "*cidrLimit*none is inserted"); k.present(aList) {
			t.Error("a bad entry was inserted")
		}
		k.write("entry.json", `{"type":"ip-masq","cidrLimit":7}`)
		k.sync()
		k.write("entry.json", `{"type":"bridge"}`)
		k.write(aList, listNamed("a"))
		k.after(minWait, "type: must be*the last good one is inserted")
		has("the last good one", `"cidrLimit":7`)
		k.remove("entry.json")
		k.sync()
		has("what was there already", `"cidrLimit":7`)
		k.write(aList, listNamed("a"))
		k.after(minWait)
		has("the last good one", `"cidrLimit":7`)
		if len(k.last.Findings) != 1 || k.last.Findings[0].ID != EntryFileMissing {
			t.Error(k.last.Findings)
		}
	})
}

// TestManagerFollowsTheEntryFile: the entry that ip-masq inserted is replaced when the entry file changes, if ADDs would
// pass; one that somebody else wrote is not, and says so.
func TestManagerFollowsTheEntryFile(t *testing.T) {
	const one, two, three = `{"type":"ip-masq","cidrLimit":1}`, `{"type":"ip-masq","cidrLimit":2}`, `{"cidrLimit" : 3, "type":"ip-masq"}`
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		var refusal error
		var asked []string
		k.Ask = func(_ context.Context, list config.Conflist) error {
			asked = append(asked, string(list.Plugins[list.Entries[0].Index]))
			return refusal
		}
		has := func(entry string, findings ...string) {
			t.Helper()
			var got []string
			for _, f := range k.last.Findings {
				got = append(got, f.ID)
			}
			doc, err := os.ReadFile(k.path(aList))
			if err != nil || string(doc) != listWith("a", entry) || !slices.Equal(got, findings) {
				t.Errorf("%v %v %s", got, err, doc)
			}
		}
		k.write("entry.json", one)
		k.write(aList, listNamed("a"))
		k.sync()
		has(one)
		k.write("entry.json", two)
		k.sync()
		has(two)
		assert.Equal(t, "asked", asked, []string{two})
		k.logged(1, "replaced the plugin entry")
		k.logged(1, "changed=cidrLimit")

		refusal = errors.New("conflicts with another network")
		k.write("entry.json", three)
		k.sync("conflist.entry_file*no pod of network \"a\" would start with it: conflicts with another network*the last good one")
		if p := k.last.Problems[0]; p.Reason != "source" {
			t.Error(p)
		}
		has(two)
		k.write(aList, listNamed("a")) // the main plugin is restarted
		k.after(minWait, "no pod of network \"a\" would start with it")
		has(two)
		refusal = nil
		k.sync()
		has(three)

		k.write(aList, listWith("a", one)) // by hand
		k.sync()
		has(one, EntryDiffers)
		if !strings.Contains(k.last.Findings[0].Message, "differs from conflist.entry_file in cidrLimit") {
			t.Error(k.last)
		}
		k.write("entry.json", two)
		k.sync()
		has(one, EntryDiffers)
		k.write("entry.json", one) // equal: it is ip-masq's from now on
		k.sync()
		has(one)
		k.write("entry.json", two)
		k.sync()
		has(two)
		k.write(aList, listWith("a", one))
		k.sync()
		k.write(aList, listNamed("a")) // removed by hand
		k.after(minWait)
		has(two)

		k.remove("entry.json")
		k.sync()
		has(two, EntryFileMissing)
		fresh := manage(t) // a reconciler that starts
		fresh.dir, fresh.Dir, fresh.BinDir = k.dir, k.Dir, k.BinDir
		fresh.Backups, fresh.RecordPath, fresh.ReadEntry = k.Backups, k.RecordPath, k.ReadEntry
		k = fresh
		k.write(aList, listNamed("a"))
		k.sync()
		has(two, EntryFileMissing)
	})
}

// TestManagerFollowsInOtherFiles: a service mesh copies the main CNI plugin's file, and the runtime uses the copy. The
// entry that ip-masq wrote into the main file follows the entry file, too: the mesh will copy it again.
func TestManagerFollowsInOtherFiles(t *testing.T) {
	const one, two, own = `{"type":"ip-masq","cidrLimit":1}`, `{"type":"ip-masq","cidrLimit":2}`, `{"type":"ip-masq","cidrLimit":9}`
	const istio, copied = `{"type":"istio-cni"}`, "net.d/02-istio-cni.conflist"
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		has := func(main, mesh string) {
			t.Helper()
			assert.Equal(t, "files", filesOf(t, k.Dir), map[string]string{
				"10-a.conflist": listWith("a", main), "02-istio-cni.conflist": listWith("a", mesh, istio), "20-b.conflist": listWith("b", own),
			})
		}
		k.write("net.d/20-b.conflist", listWith("b", own))
		k.write("entry.json", one)
		k.write(aList, listNamed("a"))
		k.sync()
		k.write(copied, listWith("a", one, istio))
		k.sync()
		has(one, one)
		k.write("entry.json", two)
		k.sync()
		k.sync()
		has(two, two)
		k.logged(2, "replaced the plugin entry")
		k.write(copied, listWith("a", two, istio)) // the mesh starts again
		k.sync()
		has(two, two)
		k.write(aList, listWith("a", own)) // by hand
		k.write("entry.json", one)
		k.sync()
		k.sync()
		has(own, one)
		k.logged(3, "replaced the plugin entry")

		// What cannot be written is tried again after a time that doubles.
		k.write(aList, listWith("a", one))
		k.write(copied, listWith("a", one, istio))
		k.sync()
		k.remove(copied)
		k.sync() // it is ip-masq's now
		k.write(copied, listWith("a", two, istio))
		k.write("entry.json", two)
		unlock := k.lock()
		k.sync()
		if len(k.last.Warnings) != 1 || time.Until(k.last.Next) <= 0 {
			t.Errorf("%+v", k.last)
		}
		unlock()
		k.after(time.Minute)
		has(two, two)
	})
}

// TestManagerWithoutARecord: an entry of an earlier version is ip-masq's if its backup shows that.
func TestManagerWithoutARecord(t *testing.T) {
	for _, withBackup := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			k := manage(t)
			k.write("entry.json", `{"type":"ip-masq","cidrLimit":1}`)
			k.write(aList, listNamed("a"))
			k.sync()
			k.remove("backups/conflists.json")
			if !withBackup {
				k.remove("backups")
			}
			k.write("entry.json", `{"type":"ip-masq","cidrLimit":2}`)
			k.sync()
			if doc, err := os.ReadFile(k.path(aList)); err != nil || strings.Contains(string(doc), `"cidrLimit":2`) != withBackup || len(k.last.Findings) > 0 == withBackup {
				t.Errorf("backup %v: %+v, %v %s", withBackup, k.last, err, doc)
			}
		})
	}
}

// TestManagerKilledWhileItReplaces: the file still has the former entry, and the record both.
func TestManagerKilledWhileItReplaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write("entry.json", `{"type":"ip-masq","cidrLimit":1}`)
		k.write(aList, listNamed("a"))
		k.sync()
		assert.NoError(t, k.recordEntries(t.Context(), Network{Path: k.path(aList)}, []byte(`{"type":"ip-masq","cidrLimit":1}`), []byte(`{"type":"ip-masq","cidrLimit":2}`)))
		k.write("entry.json", `{"type":"ip-masq","cidrLimit":3}`)
		k.sync()
		if doc, err := os.ReadFile(k.path(aList)); err != nil || !strings.Contains(string(doc), `"cidrLimit":3`) {
			t.Errorf("%+v %v %s", k.last, err, doc)
		}
	})
}

func TestManagerNamesItsNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.Network = "b"
		k.write(aList, listNamed("a"))
		k.sync("waiting for the main CNI plugin's network: find the network b*--conflist-network*cni.exclusive=false")
		k.write("net.d/20-b.conflist", listNamed("b"))
		if k.sync(); k.present(aList) || !k.present("net.d/20-b.conflist") {
			t.Error("not in the named network")
		}
	})
}

// TestManagerTriesAgain: a failure is retried after a time that doubles, and not before, whatever happens in the directory.
func TestManagerTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write(aList, listNamed("a"))
		unlock := k.lock()
		var waits []time.Duration
		for range 9 {
			k.sync("another process holds the lock")
			start := time.Now()
			if k.sync("another process holds the lock"); time.Since(start) > 0 {
				t.Error("tried at once")
			}
			waits = append(waits, time.Until(k.last.Next))
			time.Sleep(waits[len(waits)-1])
		}
		want := []time.Duration{2, 4, 8, 16, 32, 64, 128, 256, 300}
		for i := range want {
			want[i] *= minWait
		}
		assert.Equal(t, "waits", waits, want)
		unlock()
		if k.sync(); !k.present(aList) || !k.last.Next.IsZero() {
			t.Error("it is not tried again")
		}
	})
}

// TestManagerReplacesAgain: a replacement that fails is retried like an insertion, and what is known of the last write
// stays known.
func TestManagerReplacesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write("entry.json", `{"type":"ip-masq","cidrLimit":1}`)
		k.write(aList, listNamed("a"))
		k.sync()
		k.notExchanged = errors.New("unsupported operation")
		k.write("entry.json", `{"type":"ip-masq","cidrLimit":2}`)
		unlock := k.lock()
		for _, want := range []time.Duration{2, 4, 8, 16, 32, 64, 128, 256, 300, 300} {
			k.sync("the plugin entry cannot be replaced; it is tried again*another process holds the lock")
			start := time.Now()
			if k.sync("another process holds the lock"); time.Since(start) > 0 {
				t.Error("tried at once")
			}
			assert.Equal(t, "wait", time.Until(k.last.Next), want*minWait)
			if len(k.last.Findings) != 1 || k.last.Findings[0].ID != NotExchanged || len(k.last.Warnings) > 0 {
				t.Errorf("%+v", k.last)
			}
			time.Sleep(time.Until(k.last.Next))
		}
		unlock()
		k.sync()
		doc := content(t, k.path(aList))
		if string(doc) != listWith("a", `{"type":"ip-masq","cidrLimit":2}`) || !k.last.Next.IsZero() || len(k.last.Findings) > 0 {
			t.Errorf("%+v %s", k.last, doc)
		}
	})
}

// TestManagerWarnsOfNoMissingBackup: where a replacement fails because no backup can be kept, the problem says so, and no
// warning names a backup that is not there.
func TestManagerWarnsOfNoMissingBackup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write("entry.json", `{"type":"ip-masq","cidrLimit":1}`)
		k.write(aList, listNamed("a"))
		k.sync()
		k.write("entry.json", `{"type":"ip-masq","cidrLimit":2}`)
		text := content(t, k.path(aList))
		beside := aList + "." + config.DigestOf(text)[:16] + ".bak"
		k.write(beside, "another text")
		calls, backups := 0, k.Backups
		k.Backups = func() (string, error) {
			if calls++; calls > 1 { // the first one is for the record
				return "", errors.New("no space")
			}
			return backups()
		}
		k.sync("back up*beside it")
		if len(k.last.Warnings) > 0 {
			t.Error(k.last.Warnings)
		}
	})
}

// TestManagerRaces: another program that keeps changing the file does not make the entry come late.
func TestManagerRaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		backups, changes := k.Backups, 0
		k.Backups = func() (string, error) { // called before each replacement
			changes++
			k.write(aList, listNamed(strings.Repeat("a", changes)))
			return backups()
		}
		k.write(aList, listNamed("b"))
		for range 9 {
			if k.after(minWait, "another program changed the file"); time.Until(k.last.Next) != minWait {
				t.Fatal(k.last)
			}
		}
		k.Backups = backups
		if k.after(minWait); !k.present(aList) {
			t.Error("it is not there")
		}
	})
}

// TestManagerDoesNotNeedBackups: where none can be kept the entry comes all the same, with a warning.
func TestManagerDoesNotNeedBackups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write("backups", "a file in its place")
		k.write(aList, listNamed("a"))
		if k.sync(); !k.present(aList) || len(k.last.Warnings) != 1 {
			t.Error(k.last)
		}
	})
}

func TestManagerToleratesOneEntryAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write(aList, listWith("a", bareEntry, `{"type":"portmap"}`, bareEntry))
		k.sync()
		doc, err := os.ReadFile(k.path(aList))
		if err != nil || strings.Count(string(doc), `"ip-masq"`) != 1 || !k.last.Present {
			t.Errorf("%v %s", err, doc)
		}
		k.logged(1, "updated the conflist")
	})
}

// TestManagerFollowsAConf: the main CNI plugin changes the file that the list was
// made of.
func TestManagerFollowsAConf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write("net.d/10-x.conf", single)
		k.sync()
		k.write("net.d/10-x.conf", `{"cniVersion":"1.0.0","name":"one","type":"ptp","mtu":9000}`)
		if k.sync(); time.Until(k.last.Next) != minWait {
			t.Error("it is not updated soon", k.last)
		}
		k.after(minWait)
		doc, err := os.ReadFile(k.path("net.d/10-x-made-by-ip-masq.conflist"))
		if err != nil || !strings.Contains(string(doc), "9000") || k.last.Flapping {
			t.Errorf("%v %s", err, doc)
		}
		k.logged(1, "updated the conflist")
		assert.Equal(t, "insertions", k.writes, 1)
		k.remove("net.d/10-x.conf")
		k.after(minWait, "waiting for")
		if _, err := os.Stat(k.path("net.d/10-x-made-by-ip-masq.conflist")); !os.IsNotExist(err) {
			t.Error("it stands for a network that is gone", err)
		}
	})
}

// TestManagerFlapping: another program removes the entry as soon as it is there.
func TestManagerFlapping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const file, says = "net.d/10-kindnet.conflist", "kindnet.conflist*removed repeatedly*inserted again*cni.exclusive=false"
		k := manage(t)
		k.write(file, listNamed("kindnet"))
		k.sync()
		time.Sleep(24 * time.Hour) // how long the entry lived in peace says nothing
		for i := range 200 {
			k.write(file, listNamed("kindnet"))
			want := []string{says}[:min(1, (i+1)/maxRemovals)]
			if k.sync(want...); i > 0 {
				if k.last.Present || time.Until(k.last.Next) != minWait {
					t.Fatalf("removal %d: inserted again before %s: %+v", i+1, minWait, k.last)
				}
				time.Sleep(minWait)
				k.sync(want...)
			}
			if !k.last.Present || k.last.Inserted != 1 || k.last.Flapping != (len(want) > 0) {
				t.Fatalf("removal %d: %+v", i+1, k.last)
			}
		}
		k.logged(2, "level=") // inserted, and restored once
		if time.Until(k.last.Next) != minStay-minWait+1 {
			t.Errorf("its end is due in %s", time.Until(k.last.Next))
		}
		if k.after(time.Until(k.last.Next)); k.last.Flapping || !k.last.Next.IsZero() {
			t.Error("it is not over", k.last)
		}
		k.write(file, listNamed("kindnet")) // once is no flapping
		if k.sync(); !k.last.Present {
			t.Error(k.last)
		}
		k.logged(3, "level=")
	})
}

func TestFlappingEnds(t *testing.T) {
	for _, c := range []struct {
		name  string
		every time.Duration
		n     int
		want  time.Duration // after the last one; 0 if it is not flapping
	}{
		{"too few", time.Second, maxRemovals - 1, 0},
		{"quick ones", time.Second, maxRemovals, minStay},
		{"each half a minute, for hours", 30 * time.Second, 1000, 2 * time.Minute},
		{"each two minutes", 2 * time.Minute, 20, 8 * time.Minute},
		{"each three minutes", 3 * time.Minute, 20, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			k := manage(t)
			k.write(aList, listNamed("a"))
			k.sync()
			for range c.n {
				k.write(aList, listNamed("a"))
				time.Sleep(c.every)
				k.last = k.Sync(t.Context())
			}
			if !k.present(aList) || k.last.Flapping != (c.want > 0) || c.want > 0 && time.Until(k.last.Next) != c.want+1 {
				t.Errorf("%s: %+v, next %s", c.name, k.last, time.Until(k.last.Next))
			}
		})
	}
}
