// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// plugin writes the plugin with this mode.
func (f *fixture) plugin(mode os.FileMode) {
	f.Helper()
	f.Settings.CNIBinDir = filepath.Join(f.dir, "bin")
	path := filepath.Join(f.Settings.CNIBinDir, "ip-masq")
	must(f.T, os.MkdirAll(f.Settings.CNIBinDir, 0o755))
	f.file(path, "#!/bin/sh\n")
	must(f.T, os.Chmod(path, mode))
}

// mount puts the dataDir on a file system of its own.
func (f *fixture) mount(options string) (disk string) {
	f.Helper()
	disk = filepath.Join(f.dir, "disk")
	must(f.T, os.Mkdir(disk, 0o700))
	must(f.T, unix.Mount("disk", disk, "tmpfs", 0, options))
	f.T.Cleanup(func() {
		assert.NoError(f, unix.Unmount(disk, unix.MNT_DETACH))
	})
	f.Settings.DataDir = filepath.Join(disk, "data")
	node := Open(f.Settings, f.PluginFile, f.Drivers)
	f.Node = node
	return disk
}

func (f *fixture) readOnly(disk string) {
	f.Helper()
	must(f.T, unix.Mount("", disk, "", unix.MS_REMOUNT|unix.MS_RDONLY, "mode=0700"))
}

// TestReadiness has what makes ADDs fail although the rules are correct: one problem each, with a remedy.
func TestReadiness(t *testing.T) {
	for name, c := range map[string]struct {
		spoil  func(f *fixture, disk string)
		reason Reason
		says   []string
	}{
		"nothing": {func(*fixture, string) {}, "", nil},
		"the plugin is missing": {func(f *fixture, _ string) { f.Settings.CNIBinDir = "/nowhere" }, ReasonPlugin,
			[]string{"/nowhere/ip-masq is missing", "podnet.conflist names it", "ip-masq-reconciler install", "cni_bin_dir"}},
		"the plugin is not executable": {func(f *fixture, _ string) { f.plugin(0o644) }, ReasonPlugin, []string{"is not executable (mode 0644)", "install"}},
		"the entry is first": {func(f *fixture, _ string) {
			f.file(filepath.Join(f.Settings.CNIConfDir, "10-podnet.conflist"), `{"cniVersion": "1.0.0", "name": "podnet", "plugins": [`+
				`{"type": "ip-masq", "dataDir": "`+f.Settings.DataDir+`"}, {"type": "ptp"}]}`)
		}, ReasonConflist, []string{"plugins[0]", "first: move it behind"}},
		"another dataDir in an entry": {func(f *fixture, _ string) {
			f.conflist("other", map[string]any{"dataDir": "/var/lib/elsewhere"})
		}, ReasonConflist, []string{"10-other.conflist: plugins[1]: dataDir", "/var/lib/elsewhere", "state the same in both"}},
		"requireAgentConfig without a source": {func(f *fixture, _ string) {
			f.conflist("podnet", map[string]any{"requireAgentConfig": true})
		}, ReasonConflist, []string{"plugins[1]: requireAgentConfig: ", "so no pod can start", "set agent_config_dir"}},
		"a read-only dataDir": {func(f *fixture, disk string) { f.readOnly(disk) }, ReasonState,
			[]string{"read-only file system", "mount its file system writable", "after a reboot"}},
		"a disk with less space than the largest document has": {func(f *fixture, disk string) {
			var list []string
			for i := range 1000 {
				list = append(list, fmt.Sprintf("20.%d.%d.0/24", i/250, i%250))
			}
			f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": list, "cidrLimit": len(list)})
			f.right()
			fill(f, disk)
			ballast := filepath.Join(disk, "ballast")
			info, err := os.Stat(ballast)
			if err == nil {
				err = os.Truncate(ballast, info.Size()-8<<10)
			}
			must(f.T, err)
		}, ReasonState, []string{"no space left on device", "free space"}},
		"a full disk": {func(f *fixture, disk string) { fill(f, disk) }, ReasonState, []string{"no space left on device", "free space"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			disk := f.mount("size=256k,mode=0700")
			f.plugin(0o755)
			f.conflist("podnet", nil)
			f.right()
			c.spoil(f, disk)
			r := f.Check(t.Context())
			f.AddReadiness(t.Context(), r)
			if c.reason == "" {
				if !r.Ready() {
					t.Errorf("not ready: %v", problems(r))
				}
				return
			}
			if len(r.Problems) != 1 || r.Problems[0].Reason != c.reason {
				t.Fatalf("problems %+v, want one of reason %s", r.Problems, c.reason)
			}
			assert.ErrorContains(t, problems(r), c.says...)
		})
	}
}

// fill leaves no space on the file system.
func fill(f *fixture, disk string) {
	f.Helper()
	ballast, err := os.Create(filepath.Join(disk, "ballast"))
	must(f.T, err)
	for err == nil {
		_, err = ballast.Write(make([]byte, 4096))
	}
	must(f.T, ballast.Close())
}

// TestReadinessBesideReconciler: the active reconciler tells why ADDs fail, and repairs rules that differ.
// Check does not.
func TestReadinessBesideReconciler(t *testing.T) {
	f := newFixture(t)
	f.conflist("podnet", nil)
	f.right()
	f.Settings.CNIBinDir = "/nowhere"
	if r := f.Check(t.Context()); !r.Ready() {
		t.Errorf("problems %v", problems(r))
	}
	f.nft("flush", "ruleset")
	if r := f.Check(t.Context()); len(r.Problems) != 1 || r.Problems[0].Reason != ReasonRules {
		t.Errorf("without rules: %v", problems(r))
	}
}

// TestDataDirOfPluginFile: a reconciler with another dataDir than that of plugin.toml makes no sync, and waits.
func TestDataDirOfPluginFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		f.file(f.PluginFile, "data_dir = \"/var/lib/third\"\n")
		f.run().until("second report", func(all []*Report) bool {
			r := last(all)
			if !r.Waiting || len(r.Problems) != 1 || r.Problems[0].Reason != ReasonState {
				t.Errorf("with plugin.toml: %+v", r)
			}
			return len(all) > 1
		})
	})
}

// TestDamagedDocumentOnReadOnlyDisk: the rules stay as they are while the document cannot be written again.
func TestDamagedDocumentOnReadOnlyDisk(t *testing.T) {
	f := newFixture(t)
	disk := f.mount("size=256k,mode=0700")
	f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	f.right()
	document := f.Dir.DocumentPath(policy.SourceID{Kind: policy.Network, Name: "podnet"})
	text := assert.Must(os.ReadFile(document))(t)
	f.file(document, string(text[:20]))
	f.readOnly(disk)
	before := f.nft("list", "ruleset")
	for range 2 {
		r := f.sync()
		f.wants(r, Failed, document, "read-only file system")
		if len(r.Problems) != 1 || r.Problems[0].Reason != ReasonState {
			t.Errorf("problems %+v", r.Problems)
		}
		assert.Equal(t, "ruleset", f.nft("list", "ruleset"), before)
	}
	must(t, unix.Mount("", disk, "", unix.MS_REMOUNT, "mode=0700"))
	f.wants(f.right(), Changed)
	f.exempts("10.1.0.0/16," + ofNetworks)
}
