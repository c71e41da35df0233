// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// ownNames returns the names of the files that ip-masq, or an earlier version, writes into a directory of conflists.
func ownNames() []string {
	return []string{copyName, "00-ip-masq.conflist", "10-x-made-by-ip-masq.conflist", "10-a.conflist.ip-masq.bak"}
}

// TestAdministratorsFiles: whatever ip-masq does, a file of an administrator is never removed, and only the entry changes
// in it, with a backup of what it was; whatever its name is.
func TestAdministratorsFiles(t *testing.T) {
	texts := map[string]string{
		"a list":                listNamed("a"),
		"a list with the entry": listWith("a", bareEntry),
		"another network":       listWith("b", bareEntry),
		"a service mesh":        listWith("a", `{"type":"istio-cni"}`, bareEntry),
		"broken":                "{",
	}
	dos := map[string]func(k *managed){
		"install": func(k *managed) {
			e := k.Editor
			e.Entry = []byte(bareEntry)
			_, _ = e.Insert(k.t.Context())
		},
		"manage": func(k *managed) {
			for range 3 {
				k.Sync(k.t.Context())
				time.Sleep(time.Minute)
			}
		},
		"uninstall": func(k *managed) { _, _ = k.Remove() },
	}
	for _, name := range ownNames() {
		for what, text := range texts {
			for do, act := range dos {
				for _, main := range []string{"", "10-a.conflist", "10-x.conf"} {
					t.Run(strings.Join([]string{name, what, do, main}, "/"), func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) {
							k := manage(t)
							switch main {
							case "10-a.conflist":
								k.write("net.d/"+main, listNamed("a"))
							case "10-x.conf":
								k.write("net.d/"+main, single)
							}
							k.write("net.d/"+name, text)
							act(k)
							doc, err := os.ReadFile(k.path("net.d/" + name))
							if err != nil {
								t.Fatalf("the administrator's file: %v", err)
							}
							if string(doc) == text {
								return
							}
							k.backedUp("net.d/"+name, text)
							was, err := setEntry(name, []byte(text), nil, false)
							assert.NoError(t, err)
							now, err := setEntry(name, doc, nil, false)
							if err != nil || !bytes.Equal(was, now) {
								t.Errorf("%v\n%s", err, doc)
							}
						})
					})
				}
			}
		}
	}
}

// TestBackupsBesideTheFile: where the dataDir takes no backup, it is kept beside the file, and nothing is changed without.
func TestBackupsBesideTheFile(t *testing.T) {
	e := Editor{Dir: t.TempDir(), Entry: []byte(bareEntry), Backups: func() (string, error) { return "", os.ErrPermission }}
	path := filepath.Join(e.Dir, "10-a.conflist")
	assert.NoError(t, os.WriteFile(path, []byte(listNamed("a")), 0o640))
	c, err := e.Insert(t.Context())
	if err != nil || !c.Wrote || filepath.Dir(c.Backup) != e.Dir || c.BackupErr == nil {
		t.Errorf("%+v %v", c, err)
	}
	assert.Equal(t, "the backup", string(content(t, c.Backup)), listNamed("a"))
	if info, err := os.Stat(c.Backup); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v %v", info, err)
	}
	changes, err := e.Remove()
	if err != nil || len(changes) != 1 || changes[0].Backup == c.Backup {
		t.Errorf("%+v %v", changes, err)
	}
	assert.Equal(t, "the backup", string(content(t, changes[0].Backup)), listWith("a", bareEntry))
}

// TestGeneratedListOfSomebodyElse: a generated list to which another program appended its plugin, or that an
// administrator changed, is never written over or removed; one from which the other plugin is gone again follows.
func TestGeneratedListOfSomebodyElse(t *testing.T) {
	const made = "net.d/10-x-made-by-ip-masq.conflist"
	changed := strings.Replace(single, "ptp", "bridge", 1)
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write("net.d/10-x.conf", single)
		k.sync()
		text := madeOf(t, single, bareEntry)
		theirs := strings.Replace(text, bareEntry, bareEntry+`,{"type":"istio-cni"}`, 1)
		for _, edit := range []string{theirs, strings.Replace(text, `"ptp"`, `"ptp","mtu":1400`, 1)} {
			k.write(made, edit)
			k.write("net.d/10-x.conf", changed)
			k.after(time.Minute)
			assert.Equal(t, "the list", string(content(t, k.path(made))), edit)
			if len(k.last.Findings) != 1 || k.last.Findings[0].ID != ListChanged {
				t.Errorf("%+v", k.last.Findings)
			}
			k.remove("net.d/10-x.conf")
			k.after(time.Minute)
			if len(k.last.Findings) != 1 || !strings.Contains(k.last.Findings[0].Message, "is gone") {
				t.Errorf("%+v", k.last.Findings)
			}
			assert.Equal(t, "the list", string(content(t, k.path(made))), edit)
		}
		// As jq writes it.
		k.write(made, strings.ReplaceAll(text, `:`, `: `))
		k.write("net.d/10-x.conf", changed)
		k.after(time.Minute)
		assert.Equal(t, "the list", strings.ReplaceAll(string(content(t, k.path(made))), `: `, `:`), madeOf(t, changed, bareEntry))
	})
}

// TestGeneratedListWithAnotherPlugin: while the other file is as it was, a list to which another program added its plugin
// is no finding, and none says that the file has changed. What stays in use is named when the entries are removed.
func TestGeneratedListWithAnotherPlugin(t *testing.T) {
	const made = "net.d/10-x-made-by-ip-masq.conflist"
	text := madeOf(t, single, bareEntry)
	plugin := strings.TrimSpace(single)
	for name, edit := range map[string]string{
		"first, without the entry": strings.Replace(without(t, text), plugin, `{"type":"istio-cni"},`+plugin, 1),
		"last":                     strings.Replace(text, bareEntry, bareEntry+`,{"type":"istio-cni"}`, 1),
		"a changed plugin":         strings.Replace(text, `"ptp"`, `"ptp","mtu":1400`, 1),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := manage(t)
				k.write("net.d/10-x.conf", single)
				k.sync()
				k.write(made, edit)
				f := k.GeneratedFinding()
				if isPlugin := name == "a changed plugin"; isPlugin != (f != nil) || isPlugin && strings.Contains(f.Message, "which has changed") {
					t.Error(f)
				}
				changes, err := k.Remove()
				if err != nil || len(changes) != 1 || !strings.Contains(changes[0].Stays, "stays") {
					t.Errorf("%+v %v", changes, err)
				}
			})
		})
	}
}

// TestTakenName: where an administrator's file has the name of the list that is to be generated, the error says so.
func TestTakenName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.Network = "one"
		k.write("net.d/10-x.conf", single)
		k.write("net.d/10-x-made-by-ip-masq.conflist", listNamed("other"))
		k.sync("10-x-made-by-ip-masq.conflist exists*it is not a list that ip-masq made")
		assert.Equal(t, "the list", string(content(t, k.path("net.d/10-x-made-by-ip-masq.conflist"))), listNamed("other"))
	})
}

// TestListOfAnotherProcess: a list that another process of ip-masq generates meanwhile is not taken for an
// administrator's.
func TestListOfAnotherProcess(t *testing.T) {
	dir := dirWith(t, map[string]string{"10-x.conf": single})
	e := Editor{Dir: dir, Entry: []byte(bareEntry)}
	other := e
	looks := 0
	e.Check = func(string) error { // called after the look
		looks++
		if looks > 1 {
			return nil
		}
		_, err := other.Insert(t.Context())
		return err
	}
	c, err := e.Insert(t.Context())
	if err != nil || c.Wrote || c.Before != 1 {
		t.Errorf("%+v %v", c, err)
	}
	assert.Equal(t, "files", filesOf(t, dir), map[string]string{
		"10-x.conf": single, "10-x-made-by-ip-masq.conflist": madeOf(t, single, bareEntry),
	})
}

// TestMovedEntryIsLogged: an entry that goes into another file is logged, however often it was restored before.
func TestMovedEntryIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := manage(t)
		k.write(aList, listNamed("a"))
		k.sync()
		for range 3 {
			k.write(aList, listNamed("a"))
			k.after(time.Minute)
		}
		k.write("net.d/20-b.conflist", listNamed("b"))
		k.remove(aList)
		k.after(time.Minute)
		if !k.present("net.d/20-b.conflist") {
			t.Error("no entry")
		}
		k.logged(1, "20-b.conflist network=b")
	})
}
