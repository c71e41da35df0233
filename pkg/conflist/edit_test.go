// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

const bareEntry = `{"type":"ip-masq"}`

// listWith is listNamed with more plugins.
func listWith(name string, plugins ...string) string {
	all := append([]string{`{"type":"bridge"}`}, plugins...)
	return `{"name":"` + name + `","cniVersion":"1.0.0","plugins":[` + strings.Join(all, ",") + `]}`
}

// madeOf is the list that single becomes.
func madeOf(t *testing.T, conf, entry string) string {
	t.Helper()
	now := assert.Must(listOf("a.conf", []byte(conf), []byte(entry)))(t)
	return string(now)
}

func without(t *testing.T, list string) string {
	t.Helper()
	now := assert.Must(edited([]byte(list), nil))(t)
	return string(now)
}

// filesOf returns the texts of all files below a directory.
func filesOf(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, path := range slices.Concat(glob(t, dir, "*"), glob(t, dir, "*/*"), glob(t, dir, ".*")) {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			name := assert.Must(filepath.Rel(dir, path))(t)
			all[name] = string(content(t, path))
		}
	}
	return all
}

func glob(t *testing.T, dir, pattern string) []string {
	t.Helper()
	return assert.Must(filepath.Glob(filepath.Join(dir, pattern)))(t)
}

func TestInsert(t *testing.T) {
	const own, wider = `{"type":"ip-masq","cidrLimit":9}`, `{"cniVersion":"1.0.0","name":"one","type":"ptp","mtu":9000}`
	const made = "10-one-made-by-ip-masq.conflist"
	for _, c := range []struct {
		name, network string
		files         map[string]string
		writes        map[string]string // nil: nothing is written; "" : the file is gone
		is            error
	}{
		{name: "a list", files: map[string]string{"1.conflist": listWith("a")}, writes: map[string]string{"1.conflist": listWith("a", bareEntry)}},
		{name: "there already, and another one", files: map[string]string{"1.conflist": listWith("a", own, `{"type":"portmap"}`)}},
		{name: "twice", files: map[string]string{"1.conflist": listWith("a", own, bareEntry)}, writes: map[string]string{"1.conflist": listWith("a", own)}},
		{name: "the named one", network: "b", files: map[string]string{"1.conflist": listWith("a"), "2.conflist": listWith("b")},
			writes: map[string]string{"2.conflist": listWith("b", bareEntry)}},
		{name: "a single configuration", files: map[string]string{"10-one.conf": single}, writes: map[string]string{made: madeOf(t, single, bareEntry)}},
		{name: "a list made already", files: map[string]string{"10-one.conf": single, made: madeOf(t, single, own)}},
		{name: "the original has changed", files: map[string]string{"10-one.conf": wider, made: madeOf(t, single, own)},
			writes: map[string]string{made: madeOf(t, wider, own)}},
		{name: "a made list lost the entry", files: map[string]string{"10-one.conf": single, made: without(t, madeOf(t, single, bareEntry))},
			writes: map[string]string{made: madeOf(t, single, bareEntry)}},
		{name: "the original is gone", files: map[string]string{made: madeOf(t, single, bareEntry), "50-b.conflist": listWith("b")},
			writes: map[string]string{made: "", "50-b.conflist": listWith("b", bareEntry)}},
		{name: "nothing there", is: ErrNoNetworks},
		{name: "broken", is: ErrBroken, files: map[string]string{"1.conflist": "{"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, backups := dirWith(t, c.files), t.TempDir()
			p := Editor{Dir: dir, Network: c.network, Entry: []byte(bareEntry), Backups: in(backups)}
			change, err := p.Insert(t.Context())
			if !errors.Is(err, c.is) {
				t.Fatal(err)
			}
			want := maps.Clone(c.files)
			if want == nil {
				want = map[string]string{}
			}
			maps.Copy(want, c.writes)
			maps.DeleteFunc(want, func(_, text string) bool { return text == "" })
			assert.Equal(t, "files", filesOf(t, dir), want)
			if change.Wrote != (c.writes != nil) {
				t.Error(change)
			}
			if change.Backup != "" && string(content(t, change.Backup)) != c.files[filepath.Base(change.Path)] {
				t.Error("the backup is not what was there")
			}
			if err != nil {
				return
			}
			if again, err := p.Insert(t.Context()); err != nil || again.Wrote || again.Path != change.Path {
				t.Error("the second time:", again, err)
			}
		})
	}
}

// What the plugin would refuse keeps pods from starting.
func TestInsertOnlyWhatThePluginAccepts(t *testing.T) {
	files := map[string]string{"1.conflist": listWith("a"), "2.conflist": listWith("b")}
	dir := dirWith(t, files)
	refused := errors.New("not allowed")
	p := Editor{Dir: dir, Entry: []byte(bareEntry), Check: func(network string) error {
		if network == "b" {
			return nil
		}
		return refused
	}}
	if c, err := p.Insert(t.Context()); !errors.Is(err, refused) || c.Wrote || !strings.Contains(err.Error(), "1.conflist") {
		t.Error(c, err)
	}
	assert.Equal(t, "files", filesOf(t, dir), files)
	p.Network = "b"
	if c, err := p.Insert(t.Context()); err != nil || !c.Wrote {
		t.Error(c, err)
	}
}

// TestReplaceOneOfSeveral: a replacement leaves the new entry alone, however many there were, and the program that asks
// whether pods would start with it sees that list.
func TestReplaceOneOfSeveral(t *testing.T) {
	const first, second, now = `{"type":"ip-masq","cidrLimit":1}`, `{"type":"ip-masq","cidrLimit":2}`, `{"type":"ip-masq","cidrLimit":3}`
	const mesh = `{"type":"istio-cni"}`
	for name, c := range map[string]struct {
		plugins []string
		differs bool
		want    string
	}{
		"side by side":        {[]string{first, second}, true, listWith("a", now)},
		"with one in between": {[]string{first, mesh, second}, true, listWith("a", now, mesh)},
		"three":               {[]string{first, second, mesh, first}, true, listWith("a", now, mesh)},
		"one is right":        {[]string{now, mesh, second}, false, listWith("a", now, mesh)},
		"the last is right":   {[]string{first, mesh, now}, true, listWith("a", now, mesh)},
	} {
		t.Run(name, func(t *testing.T) {
			dir := dirWith(t, map[string]string{"1.conflist": listWith("a", c.plugins...)})
			var asked []string
			e := Editor{Dir: dir, Entry: []byte(now), FromFile: true, Replace: true, Ask: func(_ context.Context, list config.Conflist) error {
				asked = append(asked, string(list.Doc))
				return nil
			}}
			change, err := e.Insert(t.Context())
			if err != nil || !change.Wrote || (len(change.Replaced) > 0) != c.differs {
				t.Errorf("%+v %v", change, err)
			}
			assert.Equal(t, "files", filesOf(t, dir), map[string]string{"1.conflist": c.want})
			if c.differs {
				assert.Equal(t, "asked", asked, []string{c.want})
			}
		})
	}
}

func TestInsertWithoutBackup(t *testing.T) {
	files := map[string]string{"1.conflist": listWith("a")}
	dir := dirWith(t, files)
	backups := filepath.Join(dir, "1.conflist", "backups")
	p := Editor{Dir: dir, Entry: []byte(bareEntry), Backups: in(backups)}
	if c, err := p.Insert(t.Context()); err != nil || !c.Wrote || c.BackupErr == nil {
		t.Error(c, err)
	}
}

func TestRemove(t *testing.T) {
	const made = "10-one-made-by-ip-masq.conflist"
	dir := dirWith(t, map[string]string{
		"10-one.conf": single, made: madeOf(t, single, bareEntry),
		"20-a.conflist":                        listWith("a", bareEntry, `{"type":"portmap"}`, bareEntry),
		"30-b.conflist":                        listWith("b"),
		"40-gone-made-by-ip-masq.conflist":     madeOf(t, single, bareEntry),
		"50-broken.conflist":                   `{"type":"ip-masq"`,
		"51-broken.conflist":                   `{`,
		"60-only.conflist":                     `{"name":"only","cniVersion":"1.0.0","plugins":[{"type":"ip-masq"}]}`,
		"not-a-configuration-of-any-runtime.x": "x",
	})
	want := filesOf(t, dir)
	changes, err := Editor{Dir: dir}.Remove()
	delete(want, made)
	want["20-a.conflist"] = listWith("a", `{"type":"portmap"}`)
	// Without a record, somebody may have changed the list, so its text stays.
	const gone = "40-gone-made-by-ip-masq.conflist"
	text := want[gone]
	delete(want, gone)
	want[gone+"."+config.DigestOf([]byte(text))[:16]+".bak"] = text
	assert.Equal(t, "files", filesOf(t, dir), want)
	if len(changes) != 3 {
		t.Error(changes)
	}
	if !errors.Is(err, ErrBroken) || !errors.Is(err, ErrOnlyPlugin) {
		t.Fatal(err)
	}
	assert.ErrorContains(t, err, "50-broken", "60-only")
	if strings.Contains(err.Error(), "51-broken") {
		t.Error("a broken file without the plugin entry stops nothing:", err)
	}
	if changes, err := (Editor{Dir: filepath.Join(dir, "missing")}).Remove(); len(changes) > 0 || err != nil {
		t.Error(changes, err)
	}
}

// TestRemoveReportsDanglingSymlinks: its target may have the plugin entry.
func TestRemoveReportsDanglingSymlinks(t *testing.T) {
	dir := dirWith(t, map[string]string{"20-b.conflist": listWith("b", bareEntry)})
	assert.NoError(t, os.Symlink("/nowhere/10-a.conflist", filepath.Join(dir, "10-a.conflist")))
	changes, err := Editor{Dir: dir}.Remove()
	assert.ErrorContains(t, err, "10-a.conflist: not a regular file: it is a symlink to what is not there")
	assert.Equal(t, "changes", len(changes), 1)
}
