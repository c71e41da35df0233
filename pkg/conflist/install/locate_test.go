// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

const (
	usualConf, usualBin = "/etc/cni/net.d", "/opt/cni/bin"
	gkeBin              = "/home/kubernetes/bin"
	k3sConf             = "/var/lib/rancher/k3s/agent/etc/cni/net.d"
	k3sBin, k3sOldBin   = "/var/lib/rancher/k3s/data/cni", "/var/lib/rancher/k3s/data/current/bin"
	snapConf, snapBin   = "/var/snap/microk8s/current/args/cni-network", "/var/snap/microk8s/current/opt/cni/bin"
	shiftMain           = "/run/multus/cni/net.d"
	shiftConf, shiftBin = "/etc/kubernetes/cni/net.d", "/var/lib/cni/bin"
)

func conf(plugins ...string) string {
	var items []string
	for _, p := range plugins {
		items = append(items, `{"type": "`+p+`"}`)
	}
	return `{"cniVersion": "1.0.0", "name": "podnet", "plugins": [` + strings.Join(items, ", ") + `]}`
}

// node makes files below a root directory; those that end in / are directories.
func node(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, text := range files {
		if strings.HasSuffix(path, "/") {
			path += ".keep"
		}
		write(t, filepath.Join(root, path), text, 0o755)
	}
	return root
}

func TestLocate(t *testing.T) {
	usual := map[string]string{usualConf + "/10-x.conflist": conf("bridge", "ip-masq"), usualBin + "/bridge": ""}
	for name, c := range map[string]struct {
		files  map[string]string
		stated Dirs
		want   Dirs
		says   []string // where it fails
	}{
		"the usual": {files: usual, want: Dirs{usualConf, usualBin}},
		"GKE": {files: map[string]string{usualConf + "/10-x.conflist": conf("ptp", "portmap"), gkeBin + "/ptp": "", gkeBin + "/portmap": "",
			usualBin + "/portmap": ""}, want: Dirs{usualConf, gkeBin}},
		"k3s": {files: map[string]string{k3sConf + "/10-x.conflist": conf("flannel"), k3sBin + "/flannel": "", k3sOldBin + "/flannel": ""},
			want: Dirs{k3sConf, k3sBin}},
		"an older k3s": {files: map[string]string{k3sConf + "/10-x.conflist": conf("flannel"), k3sOldBin + "/flannel": ""},
			want: Dirs{k3sConf, k3sOldBin}},
		"microk8s": {files: map[string]string{snapConf + "/10-x.conflist": conf("calico"), snapBin + "/calico": ""}, want: Dirs{snapConf, snapBin}},
		"OpenShift": {files: map[string]string{
			shiftConf + "/00-multus.conf":         `{"name": "m", "type": "multus-shim", "clusterNetwork": "/host/run/multus/cni/net.d/10-ovn-kubernetes.conf"}`,
			shiftMain + "/10-ovn-kubernetes.conf": `{"name": "ovn-kubernetes", "type": "ovn-k8s-cni-overlay"}`,
			shiftBin + "/multus-shim":             "", shiftBin + "/ovn-k8s-cni-overlay": ""}, want: Dirs{shiftMain, shiftBin}},
		"OpenShift without a network of its own": {files: map[string]string{shiftConf + "/00-multus.conf": `{"name": "m", "type": "multus-shim"}`, shiftBin + "/multus-shim": ""}, want: Dirs{shiftConf, shiftBin}},
		"k3s beside podman's network": {files: map[string]string{k3sConf + "/10-x.conflist": conf("flannel"), k3sBin + "/flannel": "",
			usualConf + "/87-podman.conflist": conf("bridge"), usualBin + "/": ""}, want: Dirs{k3sConf, k3sBin}},
		"booting":                   {files: map[string]string{usualBin + "/bridge": ""}, want: Dirs{usualConf, usualBin}},
		"booting, with a directory": {files: map[string]string{snapConf + "/": "", snapBin + "/": "", usualBin + "/": ""}, want: Dirs{snapConf, snapBin}},
		"booting, with a broken file": {files: map[string]string{usualConf + "/10-x.conflist": "{", usualBin + "/bridge": ""},
			want: Dirs{usualConf, usualBin}},

		"nothing": {says: []string{"none of the known ones (the usual, GKE, k3s, microk8s, OpenShift)"}},
		"two that work": {files: map[string]string{usualConf + "/10-x.conflist": conf("bridge"), usualBin + "/bridge": "", gkeBin + "/bridge": ""},
			says: []string{usualConf + " with " + usualBin + " (the usual)", usualConf + " with " + gkeBin + " (GKE)"}},
		"two that boot": {files: map[string]string{usualBin + "/": "", snapBin + "/": ""}, says: []string{"(the usual)", "(microk8s)"}},

		"both stated":             {stated: Dirs{"/a", "/b"}, want: Dirs{"/a", "/b"}},
		"a conf directory":        {files: usual, stated: Dirs{Conf: k3sConf}, says: []string{"none of the known ones (k3s)"}},
		"k3s's, before others":    {files: map[string]string{k3sBin + "/": "", usualBin + "/": ""}, stated: Dirs{Conf: k3sConf}, want: Dirs{k3sConf, k3sBin}},
		"an unknown conf":         {files: map[string]string{"/c/10-x.conflist": conf("bridge"), usualBin + "/bridge": "", gkeBin + "/": ""}, stated: Dirs{Conf: "/c"}, want: Dirs{"/c", usualBin}},
		"GKE's bin decides":       {files: map[string]string{gkeBin + "/": "", usualBin + "/": ""}, stated: Dirs{Bin: gkeBin}, want: Dirs{usualConf, gkeBin}},
		"a known bin, not there":  {files: map[string]string{gkeBin + "/": ""}, stated: Dirs{Bin: usualBin}, says: []string{"there is no directory " + usualBin + "; make it"}},
		"an unknown bin":          {files: map[string]string{usualConf + "/10-x.conflist": conf("bridge"), "/b/bridge": ""}, stated: Dirs{Bin: "/b"}, want: Dirs{usualConf, "/b"}},
		"an unknown bin, no conf": {files: map[string]string{"/b/bridge": ""}, stated: Dirs{Bin: "/b"}, says: []string{"there are several"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := node(t, c.files)
			have, err := Locate(root, c.stated)
			if have != c.want || (err != nil) != (c.says != nil) {
				t.Fatalf("is %+v, %v", have, err)
			}
			if err == nil {
				return
			}
			assert.ErrorContains(t, err, append(c.says, "--cni-bin-dir")...)
			if !errors.Is(err, ErrUnknownDirs) && c.stated.Bin != usualBin {
				t.Error(err)
			}
		})
	}
}

// TestLocateIgnoresDirsOfOthers: a user who can write to /home/kubernetes must not have root run a
// program from there. A stated directory is the administrator's choice.
func TestLocateIgnoresDirsOfOthers(t *testing.T) {
	root := node(t, map[string]string{usualConf + "/10-x.conflist": conf("bridge"), gkeBin + "/bridge": ""})
	for _, dir := range []string{gkeBin, "/home/kubernetes", "/home"} {
		assert.NoError(t, os.Chmod(root+dir, 0o757))
		have, err := Locate(root, Dirs{})
		if !errors.Is(err, ErrUnknownDirs) || !strings.Contains(err.Error(), "; "+dir+" can be written by others than its owner (mode 0757, group ") {
			t.Errorf("%s: is %+v, %v", dir, have, err)
		}
		if have, err := Locate(root, Dirs{Bin: gkeBin}); have != (Dirs{usualConf, gkeBin}) || err != nil {
			t.Errorf("%s, stated: is %+v, %v", dir, have, err)
		}
		assert.NoError(t, os.Chmod(root+dir, 0o755))
	}
	if have, err := Locate(root, Dirs{}); have != (Dirs{usualConf, gkeBin}) || err != nil {
		t.Errorf("is %+v, %v", have, err)
	}
}

// dirInfo is the result of stat for a directory.
type dirInfo struct {
	fs.FileInfo
	uid, gid uint32
	mode     fs.FileMode
}

func (d dirInfo) Sys() any { return &syscall.Stat_t{Uid: d.uid, Gid: d.gid} }

func (d dirInfo) Mode() fs.FileMode { return fs.ModeDir | d.mode }

func TestCheckOwner(t *testing.T) {
	const admin = 65534 // root, in a user namespace
	us := uint32(os.Geteuid())
	remedy := "or set cni_bin_dir in /etc/ip-masq/reconciler.toml if the runtime runs its plugins from there"
	writable := "/x/bin can be written by others than its owner (mode %04o, group %d), who could replace the plugin; chmod it to 0755, " + remedy
	for _, c := range []struct {
		info dirInfo
		want string
	}{
		{dirInfo{uid: 0, mode: 0o755}, ""},
		{dirInfo{uid: us, mode: 0o700}, ""},
		{dirInfo{uid: admin, mode: 0o755}, ""},
		{dirInfo{uid: us + 4711, mode: 0o755}, fmt.Sprintf("/x/bin belongs to user %d, who could replace the plugin; chown it to root, %s", us+4711, remedy)},
		{dirInfo{uid: 0, mode: 0o775}, ""}, // as from cni-plugins-linux-amd64-v1.4.0.tgz
		{dirInfo{uid: 0, gid: 4711, mode: 0o775}, fmt.Sprintf(writable, 0o775, 4711)},
		{dirInfo{uid: 0, gid: 4711, mode: 0o755}, ""},
		{dirInfo{uid: 0, mode: 0o757}, fmt.Sprintf(writable, 0o757, 0)},
	} {
		have := ""
		if err := checkOwner("/x/bin", c.info, admin); err != nil {
			have = err.Error()
		}
		if have != c.want {
			t.Errorf("user %d, group %d, mode %o:\n%s\nwant:\n%s", c.info.uid, c.info.gid, c.info.mode, have, c.want)
		}
	}
}

// TestAllDirs: whatever the node has, where an uninstall that is run again finds less.
func TestAllDirs(t *testing.T) {
	confs := []string{usualConf, k3sConf, snapConf, shiftMain, shiftConf}
	for name, c := range map[string]struct {
		stated      Dirs
		confs, bins []string
	}{
		"nothing stated":  {Dirs{}, confs, []string{usualBin, gkeBin, k3sBin, k3sOldBin, snapBin, shiftBin}},
		"both":            {Dirs{"/a", "/b"}, []string{"/a"}, []string{"/b"}},
		"an unknown bin":  {Dirs{Bin: "/b"}, confs, []string{"/b"}},
		"GKE's bin":       {Dirs{Bin: gkeBin}, []string{usualConf}, []string{gkeBin}},
		"k3s's conf":      {Dirs{Conf: k3sConf}, []string{k3sConf}, []string{k3sBin, k3sOldBin}},
		"an unknown conf": {Dirs{Conf: "/c"}, []string{"/c"}, []string{usualBin, gkeBin, k3sBin, k3sOldBin, snapBin, shiftBin}},
	} {
		t.Run(name, func(t *testing.T) {
			have := AllDirs(c.stated)
			assert.Equal(t, "have", have, SearchDirs{c.confs, c.bins})
		})
	}
}

func TestSearchDirsHaveAny(t *testing.T) {
	for name, c := range map[string]struct {
		path, text string
		want       bool
	}{
		"nothing":      {"/other", "", false},
		"others alone": {usualConf + "/10-x.conflist", conf("bridge"), false},
		"the entry":    {usualConf + "/10-x.conflist", conf("ptp", "ip-masq"), true},
		"the binary":   {usualBin + "/ip-masq", "", true},
		"a leftover":   {usualBin + "/.ip-masq-3k5.tmp", "", true},
	} {
		t.Run(name, func(t *testing.T) {
			root := node(t, map[string]string{c.path: c.text})
			p := SearchDirs{[]string{root + usualConf}, []string{root + gkeBin, root + usualBin}}
			assert.Equal(t, "HaveAny", p.HaveAny(), c.want)
		})
	}
}
