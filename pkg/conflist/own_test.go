// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

const (
	own     = "05-ip-masq.conflist"
	ownFile = "net.d/" + own
)

// manageOwn returns a Manager that keeps ip-masq's own conflist.
func manageOwn(t *testing.T) *managed {
	k := manage(t)
	k.Own = true
	return k
}

// has fails the test unless these are the files of the runtimes, by their names.
func (k *managed) has(want map[string]string) {
	k.t.Helper()
	assert.Equal(k.t, "files", filesOf(k.t, k.Dir), want)
}

func (k *managed) record() *config.OwnConflist {
	return config.ReadOwnConflist(k.OwnRecordPath)
}

// reason fails the test unless the last sync had problems of these reasons alone.
func (k *managed) reason(want ...string) {
	k.t.Helper()
	if !slices.EqualFunc(k.last.Problems, want, func(p Problem, reason string) bool { return p.Reason == reason }) {
		k.t.Errorf("%+v, want %s", k.last.Problems, want)
	}
}

// TestOwnFollowsTheMainFile: the copy follows the main CNI plugin's file, whose bytes stay, and is removed with it.
func TestOwnFollowsTheMainFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manageOwn(t)
		k.sync("waiting for the main CNI plugin's network")
		k.has(map[string]string{})
		k.write(aList, listNamed("a"))
		k.mode(aList, 0o640)
		k.sync()
		k.has(map[string]string{"10-a.conflist": listNamed("a"), own: listWith("a", bareEntry)})
		if info, err := os.Stat(k.path(ownFile)); err != nil || info.Mode() != 0o640 || !k.last.Present {
			t.Errorf("%v %v %+v", info.Mode(), err, k.last)
		}
		if r := k.record(); r.Main != k.path(aList) || r.File != k.path(ownFile) || r.Digest != config.DigestOf([]byte(listNamed("a"))) {
			t.Errorf("%+v", r)
		}
		k.logged(1, "inserted the plugin entry")
		before, _ := os.Stat(k.path(ownFile))
		k.after(time.Second)
		if now, err := os.Stat(k.path(ownFile)); err != nil || !os.SameFile(before, now) {
			t.Error("it is written again though nothing has changed")
		}

		changed := strings.Replace(listNamed("a"), `"bridge"`, `"ptp"`, 1)
		k.write(aList, changed)
		k.after(time.Second)
		text := map[string]string{"10-a.conflist": changed, own: strings.Replace(listWith("a", bareEntry), `"bridge"`, `"ptp"`, 1)}
		k.has(text)
		k.logged(1, "updated the conflist")
		for _, edit := range []string{changed, listWith("a", `{"type":"ip-masq","cidrLimit":7}`), listWith("b", bareEntry), "{", ""} {
			k.write(ownFile, edit)
			k.after(time.Minute)
			k.has(text)
		}

		time.Sleep(removalWindow)
		k.write(aList, "{")
		k.after(time.Second, k.path(ownFile)+" is a copy of*10-a.conflist, which has changed since*cannot be loaded")
		k.reason("conflist-stale")
		k.has(map[string]string{"10-a.conflist": "{", own: text[own]})
		// The runtime uses this file, which has no entry, instead of the copy.
		k.write("net.d/00-a.conflist", changed)
		k.remove(aList)
		k.after(time.Second, "the main CNI plugin has another file now", "00-a.conflist sorts before")
		k.reason("conflist-stale", "conflist")
		k.remove("net.d/00-a.conflist")
		k.write("net.d/04-b.conflist", changed)
		k.after(time.Second)
		k.has(map[string]string{"04-b.conflist": changed, "00-ip-masq.conflist": text[own]})
		k.remove("net.d/04-b.conflist")
		k.after(time.Second, "waiting for")
		k.has(map[string]string{})
		if k.record() != nil {
			t.Errorf("%+v", k.record())
		}
	})
}

// TestOwnPath: the copy sorts directly before the main CNI plugin's file, or nothing is written.
func TestOwnPath(t *testing.T) {
	multus := `{"name":"m","type":"multus","clusterNetwork":"/etc/cni/net.d/10-a.conflist"}`
	for name, c := range map[string]struct {
		files   map[string]string
		network string
		want    string
		says    string
	}{
		"before the others":     {files: map[string]string{"10-a.conflist": listNamed("a"), "20-b.conflist": listNamed("b")}, want: own},
		"Cilium's":              {files: map[string]string{"05-cilium.conflist": listNamed("a")}, want: "00-ip-masq.conflist"},
		"between":               {files: map[string]string{"05-x.conflist": listNamed("a")}, want: own},
		"a single plugin":       {files: map[string]string{"10-x.conf": single}, want: own},
		"beside loopback":       {files: map[string]string{"01-lo.conf": `{"name":"lo","type":"loopback"}`, "10-a.conflist": listNamed("a")}, want: own},
		"no name":               {files: map[string]string{"00-calico.conflist": listNamed("a")}, says: "00-calico.conflist sorts before 00-ip-masq.conflist"},
		"another network first": {files: map[string]string{"07-b.conflist": listNamed("b"), "10-a.conflist": listNamed("a")}, network: "a", says: "07-b.conflist comes before the file of network \"a\""},
		"Multus first":          {files: map[string]string{"00-multus.conf": multus, "10-a.conflist": listNamed("a")}, says: "through Multus"},
		"Multus, named":         {files: map[string]string{"00-multus.conf": multus, "10-a.conflist": listNamed("a")}, network: "a", says: "through Multus"},
		"an administrator's":    {files: map[string]string{own: listWith("b", bareEntry), "10-a.conflist": listNamed("a")}, want: "00-ip-masq.conflist"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := manageOwn(t)
				k.Network = c.network
				for file, text := range c.files {
					k.write("net.d/"+file, text)
				}
				var says []string
				if c.says != "" {
					says = []string{"would not use ip-masq's own conflist*" + c.says + "*own = false and manage = true"}
				}
				k.sync(says...)
				files := filesOf(t, k.Dir)
				for file, text := range c.files {
					assert.Equal(t, file, files[file], text)
					delete(files, file)
				}
				if c.want == "" {
					k.reason("conflist")
				}
				if names := slices.Collect(maps.Keys(files)); c.want == "" && len(names) > 0 || c.want != "" && (len(names) != 1 || names[0] != c.want || !k.present("net.d/"+c.want)) {
					t.Errorf("%q were written", files)
				}
			})
		})
	}
}

// TestOwnOfASinglePlugin: the list that was generated before gives way to the copy, and the other way round.
func TestOwnOfASinglePlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write("net.d/10-x.conf", single)
		k.sync()
		generated := map[string]string{"10-x.conf": single, "10-x-made-by-ip-masq.conflist": madeOf(t, single, bareEntry)}
		k.has(generated)
		k.Own = true
		k.after(time.Second)
		k.has(map[string]string{"10-x.conf": single, own: madeOf(t, single, bareEntry)})
		k.Own = false
		k.after(time.Second)
		k.has(generated)
	})
}

// TestOwnFollowsTheEntryFile: a changed entry file reaches the copy, after it was asked for.
func TestOwnFollowsTheEntryFile(t *testing.T) {
	const one, two = `{"type":"ip-masq","cidrLimit":1}`, `{"type":"ip-masq","cidrLimit":2}`
	synctest.Test(t, func(t *testing.T) {
		k := manageOwn(t)
		asked := 0
		var refusal error
		k.Ask = func(_ context.Context, list config.Conflist) error {
			asked++
			if list.Err != nil || len(list.Entries) != 1 || list.File != k.path(ownFile) {
				t.Errorf("%+v", list)
			}
			return refusal
		}
		k.write("entry.json", one)
		k.write(aList, listNamed("a"))
		k.sync()
		refusal = errors.New("conflicts with another network")
		k.write("entry.json", two)
		k.sync("conflicts with another network*the last good one")
		k.has(map[string]string{"10-a.conflist": listNamed("a"), own: listWith("a", one)})
		refusal = nil
		k.after(time.Second)
		k.has(map[string]string{"10-a.conflist": listNamed("a"), own: listWith("a", two)})
		k.logged(1, "replaced the plugin entry")
		if asked < 2 || len(k.last.Findings) > 0 {
			t.Errorf("%d %+v", asked, k.last)
		}
	})
}

// TestOwnEnds: without conflist.own the copy is removed after the entry is in the main CNI plugin's file, with or without
// conflist.manage.
func TestOwnEnds(t *testing.T) {
	for _, unmanaged := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			k := manageOwn(t)
			k.write(aList, listNamed("a"))
			k.sync()
			k.Own, k.Unmanaged = false, unmanaged
			unlock := k.lock("net.d")
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			k.last = k.Sync(ctx)
			if !k.present(ownFile) || k.present(aList) {
				t.Error("the copy is gone before the entry is in the file")
			}
			unlock()
			k.after(time.Minute)
			k.has(map[string]string{"10-a.conflist": listWith("a", bareEntry)})
			if k.record() != nil {
				t.Errorf("%+v", k.record())
			}
			k.write(aList, listNamed("a"))
			k.after(time.Minute)
			if k.present(aList) == unmanaged {
				t.Errorf("unmanaged: %v, and the entry is there: %v", unmanaged, !unmanaged)
			}
		})
	}
}

// TestOwnKilled: whenever the process is killed, the copy counts as stale until the next sync, or is right.
func TestOwnKilled(t *testing.T) {
	old := strings.Replace(listNamed("a"), `"bridge"`, `"ptp"`, 1)
	right := map[string]string{"10-a.conflist": listNamed("a"), own: listWith("a", bareEntry)}
	for name, c := range map[string]struct {
		copied string // "" for none
		digest string // of the text on record; "-" for no record
		stale  bool
	}{
		"before the first copy was written":  {"", "", false},
		"before the first copy was recorded": {listWith("a", bareEntry), "", true},
		"before the next copy was written":   {strings.Replace(listWith("a", bareEntry), `"bridge"`, `"ptp"`, 1), old, true},
		"before the next copy was recorded":  {listWith("a", bareEntry), old, true},
		"and the record was lost":            {listWith("a", bareEntry), "-", false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := manageOwn(t)
				k.write(aList, listNamed("a"))
				if c.digest != "-" {
					r := &config.OwnConflist{File: k.path(ownFile), Main: k.path(aList), Network: "a"}
					if c.digest != "" {
						r.Digest = config.DigestOf([]byte(c.digest))
					}
					assert.NoError(t, k.recordOwn(t.Context(), r))
				}
				if c.copied != "" {
					k.write(ownFile, c.copied)
				}
				if err := staleOwn(k); (err != nil) != c.stale {
					t.Errorf("stale: %v", err)
				}
				k.sync()
				k.has(right)
				if err := staleOwn(k); err != nil || k.record() == nil {
					t.Error(err, k.record())
				}
			})
		})
	}
}

// TestRemoveOwn: uninstall removes the copy, also one that is stale, and never an administrator's file of that name.
func TestRemoveOwn(t *testing.T) {
	for name, c := range map[string]struct {
		own    string
		record bool
		want   string
	}{
		"on record":          {listWith("a", `{"type":"portmap"}`, bareEntry), true, ""},
		"broken":             {"{", true, ""},
		"the record is lost": {listWith("a", bareEntry), false, ""},
		"an administrator's": {listWith("b", bareEntry), false, listNamed("b")},
		"another copy":       {listWith("a", `{"type":"portmap"}`, bareEntry), false, listWith("a", `{"type":"portmap"}`)},
	} {
		t.Run(name, func(t *testing.T) {
			k := manageOwn(t)
			k.write(aList, listNamed("a"))
			k.write(ownFile, c.own)
			if c.record {
				assert.NoError(t, k.recordOwn(t.Context(), &config.OwnConflist{File: k.path(ownFile), Main: k.path(aList), Network: "a"}))
			}
			changes, err := k.Remove()
			if err != nil || len(changes) != 1 || changes[0].Path != k.path(ownFile) {
				t.Errorf("%+v %v", changes, err)
			}
			doc, err := os.ReadFile(k.path(ownFile))
			if string(doc) != c.want || (c.want == "") != errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s %v", doc, err)
			}
			assert.Equal(t, "the main CNI plugin's file", string(content(t, k.path(aList))), listNamed("a"))
		})
	}
}

// TestOwnWithoutARecord: a first copy that cannot be recorded is not written, as it could outlive the main CNI plugin
// unseen. One that is on record follows, and counts as stale until the record can be written.
func TestOwnWithoutARecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manageOwn(t)
		full, backups := errors.New("no space left on device"), k.Backups
		k.Backups = func() (string, error) { return "", full }
		k.write(aList, listNamed("a"))
		k.sync("record ip-masq's own conflist: no space left on device")
		k.reason("conflist")
		k.has(map[string]string{"10-a.conflist": listNamed("a")})
		k.Backups = backups
		k.after(time.Second)

		k.Backups = func() (string, error) { return "", full }
		k.write(aList, listWith("a", `{"type":"portmap"}`))
		k.after(time.Second, "which has changed since")
		text := map[string]string{"10-a.conflist": listWith("a", `{"type":"portmap"}`), own: listWith("a", `{"type":"portmap"}`, bareEntry)}
		k.has(text)
		k.Backups = backups
		k.after(time.Second)
		k.has(text)
	})
}

// TestOwnWithMultus: a copy to which Multus delegates stays until Multus does so no more.
func TestOwnWithMultus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manageOwn(t)
		k.write(aList, listNamed("a"))
		k.sync()
		copied := listWith("a", bareEntry)
		multus := `{"name":"m","type":"multus","clusterNetwork":"/host/etc/cni/net.d/` + own + `"}`
		k.write("net.d/00-multus.conf", multus)
		k.after(time.Second, "through Multus")
		k.has(map[string]string{"00-multus.conf": multus, "10-a.conflist": listNamed("a"), own: copied})
		k.Own = false
		k.after(time.Second, "restart Multus", own+" is a copy of*which has changed since")
		k.has(map[string]string{"00-multus.conf": multus, "10-a.conflist": copied, own: copied})
		multus = strings.Replace(multus, own, "10-a.conflist", 1)
		k.write("net.d/00-multus.conf", multus)
		k.after(time.Second)
		k.has(map[string]string{"00-multus.conf": multus, "10-a.conflist": copied})
		if k.record() != nil {
			t.Errorf("%+v", k.record())
		}
	})
}

func staleOwn(k *managed) error {
	dir, _ := config.ReadConfDir(k.Dir)
	return config.ReadOwnConflist(k.OwnRecordPath).Stale(dir)
}
