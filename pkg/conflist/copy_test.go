// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// The copy that an earlier version made, under its first name.
const (
	copyName = "05-ip-masq.conflist"
	copyFile = "net.d/" + copyName
)

// copied writes a copy of a main CNI plugin's file, with its record, as an earlier version did.
func (k *managed) copied(main, text, copyText string) {
	k.t.Helper()
	k.write(copyFile, copyText)
	r := copyRecord{File: k.path(copyFile), Main: k.path(main), Digest: config.DigestOf([]byte(text))}
	k.write("backups/own-conflist.json", string(assert.Must(json.Marshal(r))(k.t)))
}

// has fails the test unless these are the files of the runtimes, by their names.
func (k *managed) has(want map[string]string) {
	k.t.Helper()
	assert.Equal(k.t, "files", filesOf(k.t, k.Dir), want)
}

// backedUp fails the test unless a text of a runtimes' file is among the backups.
func (k *managed) backedUp(name, text string) {
	k.t.Helper()
	doc, err := os.ReadFile(backupPath(k.path("backups"), k.path(name)))
	if err != nil || string(doc) != text {
		k.t.Errorf("the backup of %s: %v %s", name, err, doc)
	}
}

// TestCopyIsRemoved: the copy that an earlier version made goes after the entry is in the main CNI plugin's file.
func TestCopyIsRemoved(t *testing.T) {
	const other = `{"type":"ip-masq","cidrLimit":7}`
	for name, c := range map[string]struct{ main, copied string }{
		"as it was made":                   {listNamed("a"), listWith("a", bareEntry)},
		"of a file that has an entry":      {listWith("a", bareEntry), listWith("a", bareEntry)},
		"of a file that has another entry": {listWith("a", other), listWith("a", bareEntry)},
		"with another entry":               {listNamed("a"), listWith("a", other)},
		"without an entry":                 {listNamed("a"), listNamed("a")},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := manage(t)
				k.write(aList, c.main)
				k.copied(aList, c.main, c.copied)
				unlock := k.lock()
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				k.Sync(ctx)
				if _, err := os.Stat(k.path(copyFile)); err != nil {
					t.Errorf("before the entry is in the file: %v", err)
				}
				unlock()
				k.after(time.Minute)
				files := filesOf(t, k.Dir)
				if _, isThere := files[copyName]; isThere || !k.present(aList) || len(files) != 1 {
					t.Errorf("%q", files)
				}
				k.backedUp(copyFile, c.copied)
				k.logged(1, "removed the copy")
				if r := readCopyRecord(k.CopyRecord); r.File != "" || len(k.last.Findings) > 0 {
					t.Errorf("%+v %+v", r, k.last)
				}
				// An administrator's file of that name is not the copy, although it was once.
				k.write(copyFile, c.copied)
				k.after(time.Minute)
				if !k.present(copyFile) {
					t.Error("an administrator's file is gone")
				}
			})
		})
	}
}

// TestCopyIsRemovedAgain: a removal of the copy that fails is retried after a time that doubles, and not before.
func TestCopyIsRemovedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write(aList, listWith("a", bareEntry))
		k.copied(aList, listWith("a", bareEntry), listWith("a", bareEntry))
		unlock := k.lock()
		for _, want := range []time.Duration{2, 4, 8} {
			for range 2 { // the second one does not try
				k.sync()
				if len(k.last.Warnings) != 1 {
					t.Errorf("%+v", k.last)
				}
				assert.Equal(t, "wait", time.Until(k.last.Next), want*minWait)
			}
			time.Sleep(time.Until(k.last.Next))
		}
		unlock()
		if k.sync(); k.present(copyFile) || len(k.last.Warnings) > 0 || !k.last.Next.IsZero() {
			t.Errorf("%+v", k.last)
		}
	})
}

// TestCopyBesideAStaleList: what is removed is reported, also where a list that was generated goes first.
func TestCopyBesideAStaleList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write("net.d/10-x-made-by-ip-masq.conflist", madeOf(t, single, bareEntry))
		k.write("net.d/20-a.conflist", listNamed("a"))
		k.copied("net.d/20-a.conflist", listNamed("a"), listWith("a", bareEntry))
		k.sync()
		k.has(map[string]string{"20-a.conflist": listWith("a", bareEntry)})
		k.logged(1, "removed the copy")
	})
}

// TestCopyOfASinglePlugin: the entry is in a generated list before the copy goes, also where the main CNI plugin has
// written its file since.
func TestCopyOfASinglePlugin(t *testing.T) {
	changed := strings.Replace(single, "bridge", "ptp", 1)
	for name, now := range map[string]string{"the same": single, "written since": changed} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := manage(t)
				k.write("net.d/10-x.conf", now)
				k.copied("net.d/10-x.conf", single, madeOf(t, single, bareEntry))
				k.sync()
				k.has(map[string]string{"10-x.conf": now, "10-x-made-by-ip-masq.conflist": madeOf(t, now, bareEntry)})
				k.backedUp(copyFile, madeOf(t, single, bareEntry))
			})
		})
	}
}

// TestUninstallWithACopy: the copy is removed with the entries, unless it is all that the runtime has.
func TestUninstallWithACopy(t *testing.T) {
	whole := listWith("a", bareEntry)
	for name, c := range map[string]struct {
		files map[string]string
		stays bool
	}{
		"beside the main file":         {map[string]string{"10-a.conflist": listNamed("a")}, false},
		"beside the file of another":   {map[string]string{"20-b.conflist": listNamed("b")}, false},
		"alone":                        {nil, true},
		"beside a broken main file":    {map[string]string{"10-a.conflist": "{"}, true},
		"beside a loopback":            {map[string]string{"99-lo.conf": `{"name":"lo","type":"loopback"}`}, true},
		"beside a main file of Multus": {map[string]string{"10-m.conf": `{"name":"m","type":"multus","delegates":[{"name":"a","type":"bridge"}]}`}, false},
	} {
		t.Run(name, func(t *testing.T) {
			k := manage(t)
			for file, text := range c.files {
				k.write("net.d/"+file, text)
			}
			k.copied(aList, listNamed("a"), whole)
			changes, err := k.Remove()
			if err != nil || len(changes) != 1 || strings.Contains(changes[0].Stays, "stays without the plugin entry") != c.stays {
				t.Errorf("%+v %v", changes, err)
			}
			k.backedUp(copyFile, whole)
			want := map[string]string{copyName: listNamed("a")}
			if !c.stays {
				want = map[string]string{}
			}
			maps.Copy(want, c.files)
			k.has(want)
			changes, err = k.Remove()
			if err != nil || len(changes) != 0 && !c.stays {
				t.Errorf("again: %+v %v", changes, err)
			}
		})
	}
}

// TestCopyThatStays: a copy stays without the main CNI plugin's file, while Multus delegates to it, and where another
// program has changed it. Then a finding names it.
func TestCopyThatStays(t *testing.T) {
	whole := listWith("a", bareEntry)
	multus := `{"name":"m","type":"multus","clusterNetwork":"/host/etc/cni/net.d/` + copyName + `"}`
	for name, c := range map[string]struct {
		copied string
		files  map[string]string
		says   string
		want   []string // problems
	}{
		"without a main file":           {copied: whole, says: "made", want: []string{"waiting for"}},
		"a plugin of another":           {copied: listWith("a", `{"type":"istio-cni"}`, bareEntry), files: map[string]string{"10-a.conflist": listNamed("a")}, says: "changed the copy since"},
		"Multus delegates":              {copied: whole, files: map[string]string{"00-multus.conf": multus, "10-a.conflist": listNamed("a")}, says: "made", want: []string{"restart Multus"}},
		"another text of the main file": {copied: strings.Replace(whole, "bridge", "ptp", 1), files: map[string]string{"10-a.conflist": listNamed("a")}, says: "changed the copy since"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := manage(t)
				for file, text := range c.files {
					k.write("net.d/"+file, text)
				}
				k.copied(aList, listNamed("a"), c.copied)
				k.sync(c.want...)
				k.after(time.Minute, c.want...)
				doc := content(t, k.path(copyFile))
				withEntry, err := setEntry(copyName, []byte(c.copied), []byte(bareEntry), false)
				assert.NoError(t, err)
				if !bytes.Equal(doc, []byte(c.copied)) && !bytes.Equal(doc, withEntry) {
					t.Errorf("the copy is %s", doc)
				}
				if len(k.last.Findings) != 1 || k.last.Findings[0].ID != ConflistCopy || !strings.Contains(k.last.Findings[0].Message, c.says) {
					t.Errorf("%+v", k.last.Findings)
				}
			})
		})
	}
}
