// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

const unitFile = "../deploy/systemd/ip-masq-reconciler.service"

// unit is a unit file as in systemd.syntax(7): values by section and key. An empty value resets the
// list before it.
type unit map[string]map[string][]string

func readUnit(t *testing.T) unit {
	t.Helper()
	u, section := unit{}, ""
	for line := range strings.Lines(string(readFile(t, unitFile))) {
		line = strings.TrimSpace(line)
		switch key, value, isPair := strings.Cut(line, "="); {
		case line == "" || line[0] == '#':
		case line[0] == '[' && line[len(line)-1] == ']':
			section = line[1 : len(line)-1]
			u[section] = map[string][]string{}
		case !isPair || section == "":
			t.Fatalf("%s: %q is neither a section nor a directive", unitFile, line)
		case value == "":
			u[section][key] = []string{}
		default:
			u[section][key] = append(u[section][key], value)
		}
	}
	return u
}

// words returns the values of a key that is a list.
func (u unit) words(key string) []string {
	return strings.Fields(strings.Join(u["Service"][key], " "))
}

// capabilities returns the unit's capabilities in the notation of setpriv.
func (u unit) capabilities(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, c := range u.words("CapabilityBoundingSet") {
		name, found := strings.CutPrefix(c, "CAP_")
		if !found {
			t.Fatalf("CapabilityBoundingSet: %q", c)
		}
		all = append(all, strings.ToLower(name))
	}
	if len(all) == 0 || len(u.words("AmbientCapabilities")) > 0 || !slices.Equal(u.words("NoNewPrivileges"), []string{"yes"}) {
		t.Fatalf("capabilities %q, ambient %q, NoNewPrivileges %q", all, u.words("AmbientCapabilities"), u.words("NoNewPrivileges"))
	}
	return all
}

// withCapabilities limits the node's reconcilers to these capabilities.
func (n *node) withCapabilities(capabilities []string) {
	set := "-all"
	for _, c := range capabilities {
		set += ",+" + c
	}
	n.prefix = []string{"setpriv", "--bounding-set", set, "--inh-caps", "-all", "--ambient-caps", "-all", "--no-new-privs", "--"}
}

// newUnitNode makes a node with the default dataDir, which the unit does not change, and two sources to apply. Its
// reconcilers have the capabilities.
func newUnitNode(t *testing.T, f backend, capabilities []string) *node {
	t.Helper()
	n := newNode(t, f)
	n.withCapabilities(capabilities)
	n.dataDir = config.DefaultDataDir
	must(t, os.MkdirAll(n.own(n.dataDir), 0o700)) // systemd creates it
	n.conflist(t, "podnet", dualStack(nil))
	n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs: [192.0.2.0/24]\nenableIPv6: true\n")
	return n
}

// TestUnitCapabilities checks that the reconciler's commands work in every backend with the unit's
// capabilities, and that some backend needs each of them.
func TestUnitCapabilities(t *testing.T) {
	capabilities := readUnit(t).capabilities(t)
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			n := newUnitNode(t, f, capabilities)
			for _, command := range []string{"once", "check", "doctor"} {
				n.wantSays(t, 0, nil, command)
			}
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
		})
	}
	for i, without := range capabilities {
		t.Run("without "+without, func(t *testing.T) {
			var fail []string
			for _, f := range backends() {
				n := newUnitNode(t, f, slices.Delete(slices.Clone(capabilities), i, i+1))
				if _, _, code := n.reconciler(t, "once"); code != 0 {
					fail = append(fail, f.name)
				}
			}
			want := map[string][]string{
				"net_admin": {"nftables", "iptables-nft", "iptables-legacy"},
				"net_raw":   {"iptables-legacy"},
			}[without]
			assert.Equal(t, "fails without CAP_"+strings.ToUpper(without), fail, want)
		})
	}
}

// remountReadOnlyExcept makes all file systems of the calling thread and its children read-only
// except for some directories.
func remountReadOnlyExcept(writable []string) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	for _, dir := range writable {
		if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %s: %w", dir, err)
		}
	}
	set := func(dir string, attributes unix.MountAttr) error {
		if err := unix.MountSetattr(unix.AT_FDCWD, dir, unix.AT_RECURSIVE, &attributes); err != nil {
			return fmt.Errorf("set mount attributes of %s (Linux 5.12 has this): %w", dir, err)
		}
		return nil
	}
	err := set("/", unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	for _, dir := range writable {
		err = errors.Join(err, set(dir, unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}))
	}
	return err
}

// TestUnitPaths checks that the reconciler works with the directories that the unit makes writable,
// and that it needs each of them.
func TestUnitPaths(t *testing.T) {
	u := readUnit(t)
	if system := u.words("ProtectSystem"); !slices.Equal(system, []string{"strict"}) {
		t.Fatalf("ProtectSystem is %q", system)
	}
	writable := u.words("ReadWritePaths")
	for _, dir := range u.words("StateDirectory") {
		writable = append(writable, filepath.Join("/var/lib", dir))
	}
	fresh := func(t *testing.T, f backend, writable []string) *node {
		t.Helper()
		n := newUnitNode(t, f, u.capabilities(t))
		must(t, os.Remove("/run/xtables.lock")) // as after a boot
		must(t, n.Node.Enclose(func() error { return remountReadOnlyExcept(writable) }))
		return n
	}
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			n := fresh(t, f, writable)
			for _, command := range []string{"once", "check", "doctor", "once"} {
				n.wantSays(t, 0, nil, command)
			}
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
			d := n.startReconciler(t, "--resync-interval", "1s").untilReady(t)
			n.alter(t, "-F IP-MASQ-AGENT", "delete table ip ip-masq")
			d.until(t, "repair", func() bool { return strings.Contains(n.rules(t), "192.0.2.0/24") })
			d.stop(t)
			if log := d.log(); strings.Contains(log, "level=ERROR") || strings.Contains(log, "read-only") {
				t.Errorf("the log has an error:\n%s", log)
			}
		})
	}
	for i, without := range writable {
		t.Run("without "+without, func(t *testing.T) {
			var fail []string
			for _, f := range backends() {
				n := fresh(t, f, slices.Delete(slices.Clone(writable), i, i+1))
				if _, _, code := n.reconciler(t, "once"); code != 0 {
					fail = append(fail, f.name)
				}
			}
			if len(fail) == 0 {
				t.Errorf("%s is writable without need", without)
			}
			t.Logf("fail: %q", fail)
		})
	}
}
