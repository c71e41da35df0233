// SPDX-License-Identifier: Apache-2.0

//go:build e2e_packages

package packages

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// manager installs and removes the packages of a release, as a package manager does.
type manager struct {
	install     func(t *testing.T, release string)
	remove      func() (string, error)
	purge       func(t *testing.T)
	isInstalled func() bool
}

// TestDebian: the life of the .deb.
func TestDebian(t *testing.T) {
	m := newMachine(t, kernel()...)
	before := m.files(t)
	testLife(t, m, manager{
		install: func(t *testing.T, release string) {
			t.Helper()
			m.run(t, "dpkg --install "+m.pack(t, release, "*_"+debArch()+".deb"))
		},
		remove: func() (string, error) { return m.try("dpkg --remove ip-masq-cni") },
		purge:  func(t *testing.T) { t.Helper(); m.run(t, "dpkg --purge ip-masq-cni") },
		isInstalled: func() bool {
			out, _ := m.try("dpkg --status ip-masq-cni")
			return strings.Contains(out, "install ok installed")
		},
	})
	m.wantOnly(t, before)
}

// TestRPM: the life of the .rpm, with Debian's rpm, which has no other packages in its database.
func TestRPM(t *testing.T) {
	m := newMachine(t, kernel()...)
	m.run(t, "mkdir -p /usr/share/fish/vendor_completions.d /usr/share/zsh/site-functions") // fish and zsh of Fedora have them
	before := m.files(t)
	const rpm = "rpm --force-debian --dbpath /packages/rpm "
	rpmArch := cmp.Or(map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[debArch()], debArch())
	testLife(t, m, manager{
		install: func(t *testing.T, release string) {
			t.Helper()
			m.run(t, rpm+"--upgrade --oldpackage --nodeps "+m.pack(t, release, "*."+rpmArch+".rpm"))
		},
		remove: func() (string, error) { return m.try(rpm + "--erase ip-masq-cni") },
		purge:  func(*testing.T) {}, // the removal removes configuration that nobody changed
		isInstalled: func() bool {
			_, err := m.try(rpm + "--query ip-masq-cni")
			return err == nil
		},
	})
	m.wantOnly(t, before)
}

// testLife installs, upgrades, downgrades and removes while pods run.
func testLife(t *testing.T, m *machine, p manager) {
	p.install(t, older)
	if m.hasEntry(t) || m.exists(pluginFile) || m.chains(t) {
		t.Fatal("the installation of the package changed the node's network")
	}
	m.run(t, "ip-masq-reconciler install")
	m.start(t)
	first := m.addPod(t)

	end := m.watch(t)
	p.install(t, newer)
	m.restarted(t, newer)
	second := m.addPod(t)
	p.install(t, older)
	m.restarted(t, older)
	third := m.addPod(t)

	// libcni's cache names the plugin, as that of CRI-O does.
	m.stop(t)
	out, err := p.remove()
	if err == nil || !strings.Contains(out, "the plugin stays") || !strings.Contains(out, "ip-masq-cni stays installed") {
		t.Errorf("removed while pods need the plugin: %v\n%s", err, out)
	}
	if !p.isInstalled() || !m.exists(pluginFile) || !m.chains(t) || m.hasEntry(t) {
		t.Error("after the refused removal: the package, the plugin or the rules are missing, or the entry is there")
	}
	for _, pod := range []int{first, second, third} {
		m.delPod(t, pod)
	}
	end()

	if out, err := p.remove(); err != nil {
		t.Fatalf("remove: %v\n%s", err, out)
	}
	if m.hasEntry(t) || m.exists(pluginFile) || m.chains(t) || m.exists("/var/lib/cni/ip-masq") {
		t.Error("after the removal: the entry, the plugin, rules or state are there")
	}
	// Another installation, as by the DaemonSet with node-settings, has files there now.
	others := []string{"/etc/ip-masq/plugin.toml", "/var/lib/cni/ip-masq/networks/podnet.json"}
	for _, file := range others {
		must(t, errors.Join(os.MkdirAll(filepath.Dir(m.path(file)), 0o700), os.WriteFile(m.path(file), nil, 0o600)))
	}
	p.purge(t)
	for _, file := range others {
		if !m.exists(file) {
			t.Errorf("the purge removed %s", file)
		}
	}
	m.run(t, "rm -rf /etc/ip-masq /var/lib/cni/ip-masq")
	if text, err := os.ReadFile(m.path(conflistFile)); err != nil || string(text) != conflist {
		t.Errorf("the conflist is %v\n%s", err, text)
	}
}

// TestUnit: systemd finds nothing wrong with the unit, and the package enables it.
func TestUnit(t *testing.T) {
	m := newMachine(t, kernel()...)
	m.run(t, "dpkg --install "+m.pack(t, older, "*_"+debArch()+".deb"))
	out, err := m.try("systemd-analyze --man=no verify ip-masq-reconciler.service")
	if err != nil || strings.Contains(out, "ip-masq") {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	if !m.exists("/etc/systemd/system/multi-user.target.wants/ip-masq-reconciler.service") {
		t.Error("the service is not enabled")
	}
}

// explained are the tags of lintian that stay, with the reason.
func explained() map[string]string {
	return map[string]string{
		"statically-linked-binary":                               "the plugin must run on any host, and an ADD must not wait for a loader",
		"initial-upload-closes-no-bugs":                          "the package is not uploaded to Debian",
		"package-supports-alternative-init-but-no-init.d-script": "without systemd each ADD repairs the rules",
	}
}

// TestLintian: lintian has nothing else to say about the .deb.
func TestLintian(t *testing.T) {
	m := unpack(t, setting(t, "IPMASQ_LINTIAN_ROOT"), kernel()...)
	out, err := m.try("lintian --allow-root --tag-display-limit 0 --display-level '>=pedantic' " + m.pack(t, newer, "*_"+debArch()+".deb"))
	t.Logf("lintian: %v\n%s", err, out)
	seen := map[string]bool{}
	// The linker joins strings, so that the end of one and the begin of the next can look like a misspelt word.
	const joined = "spelling-error-in-binary"
	for _, tag := range regexp.MustCompile(`(?m)^[EWIP]: \S+: (\S+)`).FindAllStringSubmatch(out, -1) {
		first := !seen[tag[1]]
		seen[tag[1]] = true
		if first && explained()[tag[1]] == "" && tag[1] != joined {
			t.Errorf("lintian has the tag %s", tag[1])
		}
	}
	for tag := range explained() {
		if !seen[tag] {
			t.Errorf("lintian no longer has the tag %s", tag)
		}
	}
}
