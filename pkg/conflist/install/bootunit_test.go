// SPDX-License-Identifier: Apache-2.0

package install

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// packagedUnit is the unit for archives and packages, which run the plugin beside the reconciler.
const packagedUnit = "../../../deploy/systemd/" + BootUnitName

func TestPackagedBootUnit(t *testing.T) {
	text := assert.Must(BootUnit("/usr/local/bin", config.DefaultDataDir))(t)
	golden.Check(t, packagedUnit, []byte(text))
}

// TestBootUnitIsValid asks systemd about the unit, and about one for other directories.
func TestBootUnitIsValid(t *testing.T) {
	for name, dataDir := range map[string]string{"default": config.DefaultDataDir, "elsewhere": "/srv/masq.d/a+b@c"} {
		t.Run(name, func(t *testing.T) {
			bin := t.TempDir()
			write(t, filepath.Join(bin, config.PluginType), "#!/bin/true\n", 0o755)
			dir := t.TempDir()
			text := assert.Must(BootUnit(bin, dataDir))(t)
			write(t, filepath.Join(dir, BootUnitName), text, 0o644)
			if strings.Contains(text, `"dataDir":"`+dataDir+`"`) == (name == "default") {
				t.Error(text)
			}
			path, err := exec.LookPath("systemd-analyze")
			if err != nil {
				t.Log("systemd is not installed")
				return
			}
			output, err := exec.CommandContext(t.Context(), path, "verify", "--man=no", filepath.Join(dir, BootUnitName)).CombinedOutput()
			if err != nil || strings.Contains(string(output), BootUnitName) {
				t.Errorf("systemd-analyze verify: %v\n%s", err, output)
			}
		})
	}
}

func TestBootUnitRefusesPaths(t *testing.T) {
	for _, dir := range []string{"/opt/c ni", `/opt/"`, "/opt/%h", "opt", "/opt/$HOME", "/opt\n/x"} {
		if text, err := BootUnit(dir, config.DefaultDataDir); err == nil {
			t.Errorf("%q:\n%s", dir, text)
		}
	}
}

// TestBootUnitLife: the unit and its link are written once, follow the dataDir, and are removed; what an administrator
// wrote stays.
func TestBootUnitLife(t *testing.T) {
	dir := t.TempDir()
	unit, link := filepath.Join(dir, BootUnitName), filepath.Join(dir, wantedBy, BootUnitName)
	text := assert.Must(BootUnit("/opt/cni/bin", config.DefaultDataDir))(t)
	for i, want := range []bool{true, false} {
		if wrote, err := WriteBootUnit(t.Context(), dir, text); err != nil || wrote != want {
			t.Errorf("%d: wrote %v, %v", i, wrote, err)
		}
	}
	if target, err := filepath.EvalSymlinks(link); err != nil || target != assert.Must(filepath.EvalSymlinks(unit))(t) {
		t.Errorf("the link: %s %v", target, err)
	}
	assert.Equal(t, "found", FindBootUnit(dir), unit)
	if !BootUnitMentions(unit, config.DefaultDataDir) || BootUnitMentions(unit, "/srv/masq") {
		t.Error("the dataDir of the unit")
	}
	other := assert.Must(BootUnit("/opt/cni/bin", "/srv/masq"))(t)
	if wrote, err := WriteBootUnit(t.Context(), dir, other); err != nil || !wrote || !BootUnitMentions(unit, "/srv/masq") {
		t.Errorf("another dataDir: %v %v", wrote, err)
	}
	if path, err := RemoveBootUnit(dir); err != nil || path != unit {
		t.Errorf("removed %s, %v", path, err)
	}
	if entries := assert.Must(os.ReadDir(dir))(t); len(entries) > 0 {
		t.Errorf("left %v", entries)
	}
	if path, err := RemoveBootUnit(dir); err != nil || path != "" {
		t.Errorf("removed %s, %v", path, err)
	}

	for name, theirs := range map[string]string{"theirs": "[Unit]\n", "changed": content(t, packagedUnit), "masked": ""} {
		write(t, unit, theirs, 0o644)
		if _, err := WriteBootUnit(t.Context(), dir, text); err == nil || !strings.Contains(err.Error(), "stays as it is") {
			t.Errorf("%s: written: %v", name, err)
		}
		if _, err := RemoveBootUnit(dir); err == nil {
			t.Errorf("%s: removed", name)
		}
		assert.Equal(t, name, content(t, unit), theirs)
	}
}

// TestBootUnitIsDisabled: a link that an administrator replaced, such as by "systemctl mask", stays.
func TestBootUnitIsDisabled(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, wantedBy, BootUnitName)
	assert.NoError(t, os.Mkdir(filepath.Dir(link), 0o755))
	assert.NoError(t, os.Symlink("/dev/null", link))
	text := assert.Must(BootUnit("/opt/cni/bin", config.DefaultDataDir))(t)
	if _, err := WriteBootUnit(t.Context(), dir, text); err != nil {
		t.Error(err)
	}
	assert.Equal(t, "the link", assert.Must(os.Readlink(link))(t), "/dev/null")
	if _, err := RemoveBootUnit(dir); err != nil {
		t.Error(err)
	}
	assert.Equal(t, "the link", assert.Must(os.Readlink(link))(t), "/dev/null")
}
