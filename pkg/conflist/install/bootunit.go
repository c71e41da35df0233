// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// BootUnitName is the file name of the boot unit.
const BootUnitName = "ip-masq-boot.service"

// UnitDirs returns the directories from which systemd reads units: the administrator's, then those of
// packages.
func UnitDirs() []string {
	return []string{"/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"}
}

// unitDirs returns UnitDirs, after the one on record if there is one.
func unitDirs(recorded string) []string {
	if recorded == "" || slices.Contains(UnitDirs(), recorded) {
		return UnitDirs()
	}
	return append([]string{recorded}, UnitDirs()...)
}

// bootUnit is the text of the boot unit. A GC restores what all documents ask for, and prunes nothing without
// a list of valid attachments. The plugin reads its configuration from stdin, so the unit needs no shell. It
// runs before every container runtime, and after the services that load a saved ruleset, which may flush the
// rules. RequiresMountsFor is there because GC writes the record of the new boot before any rule. A failure
// is in the journal only: nothing else of a boot depends on this unit, and the reconciler repairs what the
// unit could not.
const bootUnit = `# SPDX-License-Identifier: Apache-2.0
#
# Restores the masquerade rules of the node before a container runtime starts, from the documents in the
# dataDir. "ip-masq-reconciler install --boot-unit DIR" writes this unit for other directories.

[Unit]
Description=ip-masq: restores the masquerade rules of the node before pods start
Documentation=man:ip-masq(8) https://github.com/ip-masq/ip-masq-cni
DefaultDependencies=no
RequiresMountsFor=DATADIR BINDIR
After=local-fs.target systemd-sysctl.service systemd-modules-load.service
After=firewalld.service nftables.service iptables.service ip6tables.service
After=netfilter-persistent.service ufw.service
Before=containerd.service crio.service docker.service cri-docker.service kubelet.service
Before=podman-restart.service
Before=k3s.service k3s-agent.service rke2-server.service rke2-agent.service
Before=snap.microk8s.daemon-containerd.service snap.microk8s.daemon-kubelite.service
Before=shutdown.target
Conflicts=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
Environment=CNI_COMMAND=GC CNI_PATH=BINDIR
ExecStart=-BINDIR/PLUGIN
StandardInput=data
StandardInputText=NETCONF
StandardOutput=journal
TimeoutStartSec=90s

[Install]
WantedBy=multi-user.target
`

// wantedBy is the directory of the link that enables the boot unit.
const wantedBy = "multi-user.target.wants"

// BootUnit returns the text of the boot unit for a plugin directory and a dataDir.
func BootUnit(binDir, dataDir string) (string, error) {
	plain := regexp.MustCompile(`^/[A-Za-z0-9/._+@-]*$`) // what systemd and JSON take as it is
	for _, dir := range []string{binDir, dataDir} {
		if !plain.MatchString(dir) {
			return "", fmt.Errorf("%s: a unit of systemd cannot name it; "+
				"use letters, digits and ._-+@ in its path", policy.Quote(dir))
		}
	}
	netconf := fmt.Sprintf(`{"cniVersion":"1.1.0","name":%q,"type":%q`, config.BootNetwork, config.PluginType)
	if dataDir != config.DefaultDataDir {
		netconf += fmt.Sprintf(`,"dataDir":%q`, dataDir)
	}
	netconf += "}"
	unit := strings.NewReplacer("BINDIR", binDir, "DATADIR", dataDir,
		"PLUGIN", config.PluginType, "NETCONF", netconf)
	return unit.Replace(bootUnit), nil
}

// writtenLine begins the first line of a unit that WriteBootUnit wrote. The digest of the other lines ends
// it: a unit that an administrator has changed is the administrator's.
const writtenLine = "# Written by ip-masq-reconciler install. Digest: "

func isWritten(unit string) bool {
	first, text, _ := strings.Cut(unit, "\n")
	return first == writtenLine+config.DigestOf([]byte(text))
}

// WriteBootUnit writes the boot unit into a directory of systemd and enables it. It returns whether it
// changed anything. A file of that name that it did not write stays, with an error.
func WriteBootUnit(ctx context.Context, dir, text string) (wrote bool, err error) {
	unit := writtenLine + config.DigestOf([]byte(text)) + "\n" + text
	have, err := readUnit(dir)
	if err != nil {
		return false, err
	}
	if have != "" && !isWritten(have) {
		return false, notWritten(dir)
	}
	if have != unit {
		if err := stageUnit(ctx, dir, unit); err != nil {
			return false, err
		}
		wrote = true
	}
	links := filepath.Join(dir, wantedBy)
	if err := os.Mkdir(links, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return wrote, safefile.Error("create", links, err)
	}
	link := filepath.Join(links, BootUnitName)
	err = os.Symlink(linkTarget, link)
	if errors.Is(err, fs.ErrExist) {
		return wrote, nil // enabled, or replaced by an administrator
	}
	if err != nil {
		return wrote, safefile.Error("create", link, err)
	}
	return true, nil
}

// linkTarget is relative, so that it is right in the directory as a container mounts it, too.
const linkTarget = "../" + BootUnitName

func stageUnit(ctx context.Context, dir, unit string) error {
	d, err := safefile.OpenLocked(ctx, dir, lockWait)
	if err != nil {
		return err
	}
	const unitMode = 0o644
	temp, err := d.Stage([]byte(unit), func(file *os.File) error { return file.Chmod(unitMode) })
	if err != nil {
		return errors.Join(err, d.Close())
	}
	err = d.Rename(temp, BootUnitName)
	return errors.Join(err, d.Remove(temp), d.Sync(), d.Close())
}

// RemoveBootUnit removes the boot unit that WriteBootUnit wrote into a directory, and the link that enables
// it. It returns the path, "" if there was none. A file of that name that it did not write stays, with an
// error.
func RemoveBootUnit(dir string) (path string, err error) {
	have, err := readUnit(dir)
	if have == "" || err != nil {
		return "", err
	}
	if !isWritten(have) {
		return "", notWritten(dir)
	}
	link := filepath.Join(dir, wantedBy, BootUnitName)
	if target, err := os.Readlink(link); err == nil && filepath.Base(target) == BootUnitName {
		if err := os.Remove(link); err != nil {
			return "", safefile.Error("remove", link, err)
		}
	}
	_ = os.Remove(filepath.Dir(link)) // if it is empty
	path = filepath.Join(dir, BootUnitName)
	if err := os.Remove(path); err != nil {
		return "", safefile.Error("remove", path, err)
	}
	return path, nil
}

// FindBootUnit returns the path of the boot unit, "" if there is none in the directory on record nor in
// UnitDirs.
func FindBootUnit(recorded string) string {
	for _, dir := range unitDirs(recorded) {
		path := filepath.Join(dir, BootUnitName)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return ""
}

// BootUnitMentions reports whether a boot unit is for a dataDir; one that cannot be read counts as such.
func BootUnitMentions(path, dataDir string) bool {
	text, err := readUnit(filepath.Dir(path))
	return err != nil || strings.Contains(text, "RequiresMountsFor="+dataDir+" ")
}

// readUnit returns the text of the boot unit in a directory, "" if there is none.
func readUnit(dir string) (string, error) {
	const maxUnit = 64 << 10
	text, _, err := safefile.ReadFile(filepath.Join(dir, BootUnitName), maxUnit)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err == nil && len(text) == 0 { // systemd takes an empty file for a masked unit
		return "", notWritten(dir)
	}
	return string(text), err
}

func notWritten(dir string) error {
	return fmt.Errorf("%s stays as it is: ip-masq-reconciler install did not write it; "+
		"remove it if it is not needed", policy.Printable(filepath.Join(dir, BootUnitName)))
}
