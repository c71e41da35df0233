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
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// manager installs and removes the packages of a release, as a package manager does.
type manager struct {
	install     func(release string) // the service runs then
	remove      func() (string, error)
	isInstalled func() bool
}

// TestDebian: the life of the .deb.
func TestDebian(t *testing.T) {
	m := newMachine(t)
	before := m.files(t)
	testLife(t, m, manager{
		install: func(release string) { m.run(t, "dpkg --install "+m.pack(t, release, "*_"+debArch()+".deb")) },
		remove:  func() (string, error) { return m.try("dpkg --remove ip-masq-cni") },
		isInstalled: func() bool {
			out, _ := m.try("dpkg --status ip-masq-cni")
			return strings.Contains(out, "install ok installed")
		},
	})
	// Another installation, as by the DaemonSet with node-settings, has files there now.
	others := []string{"/etc/ip-masq/plugin.toml", "/var/lib/cni/ip-masq/networks/podnet.json"}
	for _, file := range others {
		must(t, errors.Join(os.MkdirAll(filepath.Dir(m.path(file)), 0o700), os.WriteFile(m.path(file), nil, 0o600)))
	}
	m.run(t, "dpkg --purge ip-masq-cni")
	for _, file := range others {
		if !m.exists(file) {
			t.Errorf("the purge removed %s", file)
		}
	}
	m.run(t, "rm -rf /etc/ip-masq /var/lib/cni/ip-masq")
	m.wantOnly(t, before)
}

// TestRPM: the life of the .rpm, with Debian's rpm, which has no other packages in its database.
func TestRPM(t *testing.T) {
	m := newMachine(t)
	m.run(t, "mkdir -p /usr/share/fish/vendor_completions.d /usr/share/zsh/site-functions") // fish and zsh of Fedora have them
	before := m.files(t)
	const rpm = "rpm --force-debian --dbpath /packages/rpm "
	rpmArch := cmp.Or(map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[debArch()], debArch())
	testLife(t, m, manager{
		install: func(release string) {
			m.run(t, rpm+"--upgrade --oldpackage --nodeps "+m.pack(t, release, "*."+rpmArch+".rpm")+" && systemctl enable --now ip-masq-reconciler")
		},
		remove: func() (string, error) { return m.try(rpm + "--erase ip-masq-cni") },
		isInstalled: func() bool {
			_, err := m.try(rpm + "--query ip-masq-cni")
			return err == nil
		},
	})
	m.wantOnly(t, before)
}

// testLife installs, upgrades, downgrades and removes while pods run and the service runs with all that its unit
// takes from systemd.
func testLife(t *testing.T, m *machine, p manager) {
	p.install(older)
	pid := m.pid(t, older)
	if m.hasEntry(t) || m.exists(pluginFile) || m.chains(t) {
		t.Fatal("the installation of the package changed the node's network")
	}
	const verify = "systemctl is-enabled ip-masq-boot ip-masq-reconciler && " +
		"systemd-analyze --man=no verify ip-masq-boot.service ip-masq-reconciler.service 2>&1"
	assert.Equal(t, "systemd says of the units", m.run(t, verify), "enabled\nenabled\n")
	m.run(t, "ip-masq-reconciler install")
	pods := []int{m.addPod(t)}
	m.run(t, "systemctl reload ip-masq-reconciler")
	if now := m.pid(t, older); now != pid {
		t.Errorf("a reload replaced process %s by %s", pid, now)
	}
	// The service repairs rules with the capabilities that it has.
	m.run(t, "iptables -t nat -F IP-MASQ-AGENT")
	if !timelimit.Await(20*time.Second, func() bool { return strings.Contains(m.run(t, journal), "repaired rules") }) { // with the last commit
		t.Fatalf("the rules are not repaired:\n%s", m.run(t, journal))
	}
	m.check(t)

	end := m.watch(t)
	for _, release := range []string{newer, older} {
		before := pid
		p.install(release)
		if pid = m.pid(t, release); pid == before {
			t.Errorf("%s: process %s was not replaced", release, before)
		}
		if out, _ := m.try(pluginFile); !strings.Contains(out, " "+release) {
			t.Errorf("the plugin is %q, want %s", out, release)
		}
		pods = append(pods, m.addPod(t))
	}

	// libcni's cache names the plugin, as that of CRI-O does.
	out, err := p.remove()
	if err == nil || !strings.Contains(out, "the plugin stays") || !strings.Contains(out, "ip-masq-cni stays installed") {
		t.Errorf("removed while pods need the plugin: %v\n%s", err, out)
	}
	if !p.isInstalled() || !m.exists(pluginFile) || !m.chains(t) || m.hasEntry(t) {
		t.Error("after the refused removal: the package, the plugin or the rules are missing, or the entry is there")
	}
	m.pid(t, older) // the service runs again
	for _, pod := range pods {
		m.run(t, m.cnitool("del", pod))
	}
	end()

	if out, err := p.remove(); err != nil {
		t.Fatalf("remove: %v\n%s", err, out)
	}
	if m.hasEntry(t) || m.exists(pluginFile) || m.chains(t) || m.exists("/var/lib/cni/ip-masq") {
		t.Error("after the removal: the entry, the plugin, rules or state are there")
	}
	if out, err := m.try("systemctl is-active ip-masq-reconciler"); err == nil {
		t.Errorf("after the removal: the service is %s", out)
	}
	if text, err := os.ReadFile(m.path(conflistFile)); err != nil || string(text) != conflist {
		t.Errorf("the conflist is %v\n%s", err, text)
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
	m := unpack(t, setting(t, "IPMASQ_LINTIAN_ROOT"), "/proc", "/sys", "/dev", "/run")
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
