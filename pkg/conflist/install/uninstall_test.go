// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// life is a node with all that an install brings, and an uninstall of it that
// notes when the state goes.
func life(t *testing.T) (u Uninstall, binary, list string, states *int) {
	t.Helper()
	root := node(t, map[string]string{
		usualConf + "/10-x.conflist": conf("bridge", "ip-masq"), usualConf + "/20-y.conflist": conf("ip-masq", "ptp"),
		usualBin + "/bridge": "", usualBin + "/ip-masq": plugin("v1"),
	})
	binary, list = filepath.Join(root, usualBin, "ip-masq"), filepath.Join(root, usualConf, "10-x.conflist")
	states = new(int)
	u = Uninstall{SearchDirs: SearchDirs{[]string{filepath.Dir(list)}, []string{filepath.Dir(binary)}}, Root: root, RemoveState: func(context.Context) error {
		if _, err := os.Lstat(binary); err == nil {
			t.Error("the state goes while the plugin is there")
		}
		*states++
		return nil
	}}
	return u, binary, list, states
}

func TestUninstall(t *testing.T) {
	u, binary, list, states := life(t)
	write(t, filepath.Join(u.Conf[0], ".ip-masq-7.tmp"), "half", 0o600)
	write(t, filepath.Join(u.Bin[0], ".ip-masq-7.tmp"), "half", 0o600)
	done, err := u.Step(t.Context())
	if err != nil || len(done.Conflists) != 2 || !slices.Equal(done.Binaries, []string{binary}) || *states != 1 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
	assert.Equal(t, "conflist", content(t, list), conf("bridge"))
	only(t, u.Conf[0], "10-x.conflist", "20-y.conflist")
	only(t, u.Bin[0], "bridge")
	was := tree(t, u.Root)
	done, err = u.Step(t.Context())
	if d := cmp.Diff(Uninstalled{}, done); d != "" || err != nil || *states != 2 {
		t.Errorf("once more: %s, %d, %v", d, *states, err)
	}
	assert.Equal(t, "after once more", tree(t, u.Root), was)
}

// TestUninstallWaits: as long as a runtime may call the plugin it stays, and the
// state with it; new pods meet it no more.
func TestUninstallWaits(t *testing.T) {
	u, binary, list, states := life(t)
	file := filepath.Join(u.Root, libcniCache, "podnet-a-eth0")
	write(t, file, cached(t, "a", "/run/netns/a", conf("bridge", "ip-masq")), 0o600)
	for range 2 {
		done, err := u.Step(t.Context())
		if err == nil || len(done.Attached) != 1 || done.Binaries != nil || *states != 0 {
			t.Fatalf("%+v, %d, %v", done, *states, err)
		}
		assert.ErrorContains(t, err, "container a", file, "drain the node", "--no-wait")
		if content(t, list) != conf("bridge") || content(t, binary) != plugin("v1") {
			t.Error("the entry is there, or the plugin is not")
		}
	}
	gone(t, file)
	if done, err := u.Step(t.Context()); err != nil || !slices.Equal(done.Binaries, []string{binary}) || *states != 1 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
}

func TestUninstallWithoutWaiting(t *testing.T) {
	u, binary, _, states := life(t)
	u.NoWait = true
	write(t, filepath.Join(u.Root, libcniCache, "podnet-a-eth0"), cached(t, "a", "", conf("ip-masq")), 0o600)
	done, err := u.Step(t.Context())
	if err != nil || !slices.Equal(done.Binaries, []string{binary}) || len(done.Attached) != 1 || *states != 1 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
}

// TestUninstallWaitsForAdds: what an ADD under way leaves in the cache counts.
func TestUninstallWaitsForAdds(t *testing.T) {
	u, binary, list, states := life(t)
	u.AddTime = timelimit.Scale(time.Second)
	ended := make(chan error, 1)
	go func() {
		for { // until the entry is gone; then the ADD ends
			text, err := os.ReadFile(list)
			if err != nil || !strings.Contains(string(text), "ip-masq") {
				dir := filepath.Join(u.Root, libcniCache)
				ended <- errors.Join(err, os.MkdirAll(dir, 0o700),
					os.WriteFile(filepath.Join(dir, "podnet-a-eth0"), []byte(cached(t, "a", "", conf("ip-masq"))), 0o600))
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	done, err := u.Step(t.Context())
	assert.NoError(t, <-ended)
	if err == nil || !strings.Contains(err.Error(), "the plugin stays") || done.Binaries != nil || *states != 0 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
	if _, err := os.Lstat(binary); err != nil {
		t.Error(err)
	}
}

// TestUninstallOfAnEntryThatCannotBeRemoved: while a conflist may name the plugin, it stays.
func TestUninstallOfAnEntryThatCannotBeRemoved(t *testing.T) {
	for name, c := range map[string]struct{ file, text, says string }{
		"a broken list":   {"30-z.conflist", `{"plugins": [{"type": "ip-masq"}`, "fix or remove it"},
		"the only plugin": {"30-z.conflist", conf("ip-masq"), "remove the file"},
		"a lone plugin":   {"30-z.conf", `{"cniVersion": "1.0.0", "name": "z", "type": "ip-masq"}`, "remove the file"},
	} {
		t.Run(name, func(t *testing.T) {
			u, binary, list, states := life(t)
			write(t, filepath.Join(u.Conf[0], c.file), c.text, 0o644)
			_, err := u.Step(t.Context())
			assert.ErrorContains(t, err, c.says, u.Conf[0])
			if content(t, binary) != plugin("v1") || *states != 0 || content(t, list) != conf("bridge") {
				t.Error("the plugin or the state went, or the other conflist has the entry still")
			}
			gone(t, filepath.Join(u.Conf[0], c.file))
			if _, err := u.Step(t.Context()); err != nil || *states != 1 {
				t.Error(err)
			}
		})
	}
}

// TestUninstallOfAnotherPlugin: a file of the plugin's name that Copy did not create stays, and
// everything else is removed.
func TestUninstallOfAnotherPlugin(t *testing.T) {
	u, binary, _, states := life(t)
	gone(t, binary)
	u.RemoveState = func(context.Context) error { *states++; return nil }
	assert.NoError(t, os.Symlink("bridge", binary))
	done, err := u.Step(t.Context())
	if err == nil || !strings.Contains(err.Error(), "ip-masq did not create it") || done.Binaries != nil || *states != 1 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
	if _, err := os.Lstat(binary); err != nil {
		t.Error(err)
	}
}

// TestUninstallEverywhere: of a node with several runtimes nothing is left either.
func TestUninstallEverywhere(t *testing.T) {
	u, binary, list, states := life(t)
	second := SearchDirs{[]string{filepath.Join(u.Root, k3sConf)}, []string{filepath.Join(u.Root, gkeBin), filepath.Join(u.Root, k3sBin)}}
	write(t, filepath.Join(second.Conf[0], "30-z.conflist"), conf("bridge", "ip-masq"), 0o644)
	write(t, filepath.Join(second.Bin[1], "ip-masq"), plugin("v1"), 0o755)
	u.Conf, u.Bin = append(u.Conf, second.Conf...), append(u.Bin, second.Bin...)
	done, err := u.Step(t.Context())
	if err != nil || len(done.Conflists) != 3 || !slices.Equal(done.Binaries, []string{binary, filepath.Join(second.Bin[1], "ip-masq")}) || *states != 1 {
		t.Errorf("%+v, %d, %v", done, *states, err)
	}
	assert.Equal(t, "conflist", content(t, list), conf("bridge"))
}

// TestUninstallNamesWhatStays: a generated list that another program has changed stays, and is named once, also if it
// has no entry any more.
func TestUninstallNamesWhatStays(t *testing.T) {
	u, _, _, _ := life(t)
	single := filepath.Join(u.Conf[0], "40-s.conf")
	write(t, single, `{"cniVersion":"1.0.0","name":"s","type":"ptp"}`, 0o644)
	e := u.Editor
	e.Dir, e.Network, e.Entry, e.RecordPath = u.Conf[0], "s", []byte(`{"type":"ip-masq"}`), filepath.Join(t.TempDir(), "record")
	e.Backups = func() (string, error) { return filepath.Dir(e.RecordPath), nil }
	c, err := e.Insert(t.Context())
	assert.NoError(t, err)
	write(t, c.Path, `{"cniVersion":"1.0.0","name":"s","plugins":[{"type":"first"},{"type":"ptp"}]}`, 0o644)
	u.Editor.RecordPath, u.Editor.Backups = e.RecordPath, e.Backups
	done, err := u.Step(t.Context())
	if err != nil || len(done.Conflists) != 2 || len(done.Stays) != 1 || !strings.HasPrefix(done.Stays[0], c.Path+" stays") {
		t.Errorf("%+v %v", done, err)
	}
}

// TestUninstallWithoutBackup: an entry that is to go goes, and what it was cannot
// be backed up is reported.
func TestUninstallWithoutBackup(t *testing.T) {
	u, binary, list, _ := life(t)
	u.Editor.Backups = func() (string, error) { return "", fs.ErrPermission }
	done, err := u.Step(t.Context())
	if err != nil || len(done.Conflists) != 2 || !slices.Equal(done.Binaries, []string{binary}) {
		t.Errorf("%+v, %v", done, err)
	}
	for _, c := range done.Conflists {
		if !errors.Is(c.BackupErr, fs.ErrPermission) {
			t.Error(c.BackupErr)
		}
	}
	assert.Equal(t, "conflist", content(t, list), conf("bridge"))
}

// TestUninstallStopped: while ADDs end.
func TestUninstallStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, binary, _, _ := life(t)
		u.AddTime = time.Minute
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if done, err := u.Step(ctx); !errors.Is(err, ErrStopped) || len(done.Conflists) != 2 || content(t, binary) != plugin("v1") {
			t.Errorf("%+v, %v", done, err)
		}
	})
}

func TestUninstallOfNothing(t *testing.T) {
	u := Uninstall{Root: t.TempDir()}
	if done, err := u.Step(t.Context()); err != nil || cmp.Diff(Uninstalled{}, done) != "" {
		t.Errorf("%+v, %v", done, err)
	}
	u.SearchDirs = SearchDirs{[]string{u.Root + "/conf"}, []string{u.Root + "/bin"}}
	if done, err := u.Step(t.Context()); err != nil || cmp.Diff(Uninstalled{}, done) != "" {
		t.Errorf("%+v, %v", done, err)
	}
	only(t, u.Root)
}
