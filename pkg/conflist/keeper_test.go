// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"errors"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

const aList = "net.d/10-a.conflist"

func TestKeeperWaitsForANetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.says("waiting for the main CNI plugin's network in " + k.path("net.d"))
		k.after(time.Hour)
		k.logged(1, "level=INFO msg=\"waiting for")
		k.logged(0, "level=ERROR")
		k.write("net.d/10-x.conf", "{") // half of it; the next moment it is whole
		k.after(20 * time.Millisecond)
		k.write("net.d/10-x.conf", single)
		k.after(60 * time.Millisecond)
		k.says()
		if !k.last.Present || !k.present("net.d/10-x-made-by-ip-masq.conflist") {
			t.Error(k.last)
		}
		k.logged(1, "put our entry into the conflist")
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

func TestKeeperIdles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.write(aList, listWith("a", ours))
		k.after(time.Minute)
		info, err := os.Stat(k.path(aList))
		if err != nil {
			t.Fatal(err)
		}
		log := len(k.log)
		for range 100 {
			k.tell() // others come and go in the directory
			k.after(time.Minute)
		}
		now, err := os.Stat(k.path(aList))
		if err != nil || !os.SameFile(info, now) || len(k.log) != log || k.writes != 0 {
			t.Error("it is not idle", err, k.writes)
		}
	})
}

func TestKeeperWithoutPlugin(t *testing.T) {
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
		k.tell()
		k.after(60 * time.Millisecond)
		if k.says(); !k.present(aList) {
			t.Error("the entry is not there")
		}
		k.remove("bin")
		k.after(60 * time.Millisecond)
		if k.says(); !k.present(aList) { // the passes tell of the plugin
			t.Error("the entry was taken out")
		}
		k.logged(2, "level=ERROR")
	})
}

func TestKeeperEntryFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, func(k *kept) { k.write("entry.json", `{"type":"ip-masq","cidrLimit":0}`) })
		k.write(aList, listNamed("a"))
		k.after(time.Second)
		if k.says(k.path("entry.json") + "*cidrLimit*none is put in"); k.present(aList) {
			t.Error("an entry that nobody wants")
		}
		k.write("entry.json", `{"type":"ip-masq","cidrLimit":7}`)
		k.after(60 * time.Millisecond)
		k.says()
		k.write("entry.json", `{"type":"bridge"}`)
		k.write(aList, listNamed("a"))
		k.after(60 * time.Millisecond)
		k.says("type: must be*said last")
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

func TestKeeperStandsBy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, func(k *kept) { k.leads.Store(false) })
		k.write(aList, listNamed("a"))
		k.after(time.Hour)
		if k.says(); k.present(aList) || k.last.Leads || len(k.log) > 0 {
			t.Error("it does not stand by")
		}
		k.leads.Store(true)
		k.Look()
		k.wait()
		if k.says(); !k.last.Leads || !k.present(aList) {
			t.Error("it does not take over")
		}
	})
}

func TestKeeperNeverWritesFromWhatIsBroken(t *testing.T) {
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
			t.Error("it is mended, and the entry is not there")
		}
	})
}

func TestKeeperNamesItsNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, func(k *kept) { k.options.Network = "b" })
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

func TestKeeperTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		if err := os.MkdirAll(k.path("net.d"), 0o755); err != nil {
			t.Fatal(err)
		}
		unlock := k.lock("net.d")
		k.write(aList, listNamed("a"))
		k.after(longestWait + time.Second)
		k.says("another process holds the lock")
		unlock()
		k.after(30 * time.Second)
		if k.says(); !k.present(aList) {
			t.Error("it is not tried again")
		}
	})
}

// TestKeeperEndsWhileItWaits: whatever keeps a directory locked, a stop is at once.
func TestKeeperEndsWhileItWaits(t *testing.T) {
	for _, dir := range []string{"net.d", "backups"} {
		synctest.Test(t, func(t *testing.T) {
			k := keep(t, func(k *kept) {
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

// TestKeeperDoesNotNeedBackups: where none can be kept the entry comes all the
// same, and that is told.
func TestKeeperDoesNotNeedBackups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, func(k *kept) { k.write("backups", "a file in its place") })
		for range 3 {
			k.write(aList, listNamed("a"))
			k.after(time.Second)
		}
		if k.says(); !k.present(aList) || k.writes != 3 {
			t.Error(k.writes)
		}
		k.logged(1, "no backup can be kept")
	})
}

func TestKeeperToleratesOneEntryAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keep(t, nil)
		k.write(aList, listWith("a", ours, `{"type":"portmap"}`, ours))
		k.after(60 * time.Millisecond)
		doc, err := os.ReadFile(k.path(aList))
		if k.says(); err != nil || strings.Count(string(doc), `"ip-masq"`) != 1 || !k.last.Present {
			t.Errorf("%v %s", err, doc)
		}
		k.logged(1, "more than one entry of ours")
		k.write("net.d/00-b.conflist", `{"name":"n","cniVersion":"1.1.0"}`)
		k.write("net.d/n/1.conf", single)
		k.after(60 * time.Millisecond)
		if k.says("00-b.conflist*folder"); k.last.Present {
			t.Error(k.last)
		}
	})
}

// TestKeeperFollowsAConf: the main CNI plugin changes the file that our list was
// made of.
func TestKeeperFollowsAConf(t *testing.T) {
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
		k.logged(1, "made the conflist anew")
		k.remove("net.d/10-x.conf")
		k.after(60 * time.Millisecond)
		if _, err := os.Stat(k.path("net.d/10-x-made-by-ip-masq.conflist")); !os.IsNotExist(err) {
			t.Error("it stands for a network that is gone", err)
		}
		k.says("waiting for")
	})
}
