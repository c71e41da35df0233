// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

var update = flag.Bool("update", false, "write golden files")

const entry = `{"type": "ip-masq", "nonMasqueradeCIDRs": ["10.0.0.0/8"], "masqueradeCIDRs": [],
	"toPorts": "1024-65535", "randomFully": true}`

const longEntry = `{"type":"ip-masq","nonMasqueradeCIDRs":["10.0.0.0/8","172.16.0.0/12","192.168.0.0/16","198.51.100.0/24","203.0.113.0/24"]}`

func files(t *testing.T, pattern string) []string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) < 3 {
		t.Fatalf("%s: %d files, %v", pattern, len(names), err)
	}
	return names
}

func content(t *testing.T, path string) []byte {
	t.Helper()
	doc, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func golden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(string(content(t, path)), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

// loadedBy reads a text as the verbs and the reconciler do, from a directory.
func loadedBy(t *testing.T, name string, doc []byte) config.Conflist {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, name), doc, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := config.ReadConfDir(dir)
	if err != nil || len(c.Conflists) != 1 {
		t.Fatal(c, err)
	}
	return c.Conflists[0]
}

func TestAddToRealLists(t *testing.T) {
	for _, path := range files(t, "testdata/lists/*.conflist") {
		name := filepath.Base(path)
		t.Run(name, func(t *testing.T) {
			was := content(t, path)
			had, err := Present(was)
			if err != nil {
				t.Fatal(err)
			}
			now, changed, err := Add(was, []byte(entry))
			if err != nil || changed != (had != 1) {
				t.Fatal(changed, err)
			}
			golden(t, "testdata/added/"+name, now)
			list := loadedBy(t, name, now)
			if list.Err != nil || len(list.Entries) != 1 || had == 0 && list.Entries[0].Err != nil {
				t.Errorf("config reads %+v", list)
			}
			again, changed, err := Add(now, []byte(longEntry))
			if err != nil || changed || !slices.Equal(again, now) {
				t.Error("a second Add:", changed, err)
			}
			back, changed, err := Remove(now)
			if err != nil || !changed {
				t.Fatal(changed, err)
			}
			if had == 0 && !slices.Equal(back, was) {
				t.Error("Remove does not give back the bytes:", cmp.Diff(string(was), string(back)))
			}
			if n, err := Present(back); n != 0 || err != nil {
				t.Error(n, err)
			}
			if list := loadedBy(t, name, back); list.Err != nil {
				t.Error(list.Err)
			}
		})
	}
}

func TestLongListsTakeLinesWhereNeighboursDo(t *testing.T) {
	for _, name := range []string{"flannel.conflist", "tabs.conflist", "ovn-multus.conflist"} {
		now, _, err := Add(content(t, "testdata/lists/"+name), []byte(longEntry))
		if err != nil {
			t.Fatal(err)
		}
		golden(t, "testdata/long/"+name, now)
	}
}

func TestListsOfSingleConfigurations(t *testing.T) {
	for _, path := range files(t, "testdata/confs/*") {
		name := filepath.Base(path)
		now, err := FromConf(content(t, path), []byte(entry))
		if err != nil {
			t.Fatal(name, err)
		}
		golden(t, "testdata/made/"+name+"list", now)
		was, list := loadedBy(t, name, content(t, path)), loadedBy(t, "a.conflist", now)
		if list.Err != nil || list.Network != was.Network || list.CNIVersion != was.CNIVersion ||
			len(list.Entries) != 1 || list.Entries[0].Err != nil || list.Entries[0].Index != 1 {
			t.Errorf("%s: config reads %+v, of %+v", name, list, was)
		}
	}
}
