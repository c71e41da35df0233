// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestManageSymlinkedConflist manages a conflist that is a symlink into another directory. It
// checks that the entry is restored as fast as in the directory itself.
func TestManageSymlinkedConflist(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	elsewhere := filepath.Join(n.dir, "elsewhere")
	link := filepath.Join(n.cni.ConfDir, mainFile)
	target := filepath.Join(elsewhere, "podnet")
	write := func() {
		t.Helper()
		must(t, firstOf(os.MkdirAll(elsewhere, 0o755), os.WriteFile(target+".next", n.mainConflist(t, "podnet"), 0o644), os.Rename(target+".next", target)))
	}
	must(t, firstOf(os.MkdirAll(n.cni.ConfDir, 0o755), os.Symlink(target, link)))
	n.writeMainConflist(t, "20-other.conflist", "other")
	d := n.startReconciler(t, n.manageArgs(t, nil)...)
	d.untilUnready(t, "conflist: ", link, "it is a symlink to what is not there", "mount the directory")
	time.Sleep(300 * time.Millisecond)
	if n.hasPluginEntry(t, "20-other.conflist") {
		t.Error("the entry was inserted into another network")
	}
	for range 3 {
		write()
		d.untilManaged(t, mainFile)
	}
	must(t, os.WriteFile(target, n.mainConflist(t, "podnet"), 0o644)) // written in place
	d.untilManaged(t, mainFile)
	if to, err := os.Readlink(link); err != nil || to != target || n.hasPluginEntry(t, "20-other.conflist") {
		t.Error("the conflist is no longer a symlink", to, err)
	}
}

// TestManageStopsWhileLocked stops the reconciler while another process holds the directory's lock.
func TestManageStopsWhileLocked(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.writeMainConflist(t, mainFile, "podnet")
	dir, err := os.Open(n.cni.ConfDir)
	must(t, err)
	defer func() { must(t, dir.Close()) }()
	must(t, unix.Flock(int(dir.Fd()), unix.LOCK_EX))
	d := n.startReconciler(t, n.manageArgs(t, nil)...)
	d.untilUnready(t, "conflist: not looked at yet")
	d.stop(t)
}

// TestSettingsDuringOtherWrites checks that reconciler.toml is read while another program keeps
// writing files in its directory.
func TestSettingsDuringOtherWrites(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	path := n.settingsFile(t, exemptSettings("1.2.3.0/24"))
	d := n.startReconciler(t, "--config", path)
	d.untilReady(t)
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				ended <- nil
				return
			case <-time.After(20 * time.Millisecond):
			}
			if err := os.WriteFile(filepath.Join(filepath.Dir(path), "beside"), fmt.Append(nil, i), 0o644); err != nil {
				ended <- err
				return
			}
		}
	}()
	n.settingsFile(t, "resync_interval = \"0s\"\n")
	d.untilUnready(t, "settings: ", path)
	n.settingsFile(t, exemptSettings("1.2.4.0/24"))
	d.untilReady(t)
	close(stop)
	must(t, <-ended)
}
