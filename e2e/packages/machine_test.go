// SPDX-License-Identifier: Apache-2.0

//go:build e2e_packages

package packages

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

// The releases: the older one, and the one to upgrade to.
const (
	older = "v0.1.0"
	newer = "v0.1.1"
)

const (
	conflistFile = "/etc/cni/net.d/10-podnet.conflist"
	pluginFile   = "/opt/cni/bin/ip-masq"
	conflist     = `{
  "cniVersion": "1.0.0",
  "name": "podnet",
  "plugins": [
    { "type": "bridge", "bridge": "cni0", "isGateway": true, "ipam": { "type": "host-local", "subnet": "10.88.0.0/16" } }
  ]
}
`
)

// machine is a Debian machine in a directory, in the namespaces of the sandbox.
type machine struct {
	root    string
	systemd int // its process, if it runs
	pods    int
}

// setting returns the value of an environment variable that make sets.
func setting(t *testing.T, name string) string {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		t.Fatalf("%s is not set; run `make e2e-packages`", name)
	}
	return value
}

// unpack returns a machine of a tar of tools/debian-root. It shares the directories with the sandbox.
func unpack(t *testing.T, archive string, shared ...string) *machine {
	t.Helper()
	m := &machine{root: t.TempDir()}
	assert.Output(t, exec.Command("tar", "-C", m.root, "-xf", archive))
	for _, dir := range shared {
		target := m.path(dir)
		must(t, errors.Join(os.MkdirAll(target, 0o755), unix.Mount(dir, target, "", unix.MS_BIND|unix.MS_REC, ""),
			unix.Mount("", target, "", unix.MS_REC|unix.MS_PRIVATE, ""))) // or its end unmounts what is below the directory itself
		t.Cleanup(func() { must(t, unix.Unmount(target, unix.MNT_DETACH)) })
	}
	must(t, os.MkdirAll(m.path("/packages"), 0o755))
	return m
}

// newMachine returns a machine with a systemd and a container runtime's network, and without ip-masq.
func newMachine(t *testing.T) *machine {
	t.Helper()
	m := unpack(t, setting(t, "IPMASQ_DEBIAN_ROOT"))
	for _, dir := range []string{"/etc/cni/net.d", "/opt/cni/bin", "/var/lib/cni"} {
		must(t, os.MkdirAll(m.path(dir), 0o755))
	}
	for from, to := range map[string]string{"bridge": "/opt/cni/bin", "host-local": "/opt/cni/bin", "cnitool": "/usr/local/bin"} {
		m.copy(t, filepath.Join(setting(t, "IPMASQ_BIN_DIR"), "cni", from), filepath.Join(to, from))
	}
	must(t, os.WriteFile(m.path(conflistFile), []byte(conflist), 0o644))
	must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	m.bootSystemd(t)
	return m
}

var must = assert.NoError

func (m *machine) path(path string) string { return filepath.Join(m.root, path) }

func (m *machine) copy(t *testing.T, from, to string) {
	t.Helper()
	data := assert.Must(os.ReadFile(from))(t)
	must(t, os.WriteFile(m.path(to), data, 0o755))
}

// pack copies a file of a release to the machine, and returns its path there.
func (m *machine) pack(t *testing.T, release, pattern string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(setting(t, "IPMASQ_RELEASES_DIR"), release, pattern))
	if err != nil || len(files) != 1 {
		t.Fatalf("files %s of release %s: %q, %v", pattern, release, files, err)
	}
	to := "/packages/" + filepath.Base(files[0])
	m.copy(t, files[0], to)
	return to
}

func (m *machine) command(script string) *exec.Cmd {
	c := exec.Command("/bin/sh", "-c", script)
	c.SysProcAttr = &syscall.SysProcAttr{Chroot: m.root, Pdeathsig: syscall.SIGKILL}
	if m.systemd != 0 {
		c = exec.Command("/usr/bin/nsenter", "-t", fmt.Sprint(m.systemd), "-m", "-p", "-u", "-i", "-C", "-r", "-w", "/bin/sh", "-c", script)
	}
	c.Dir = "/"
	c.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8"}
	return c
}

// try runs a shell script on the machine.
func (m *machine) try(script string) (string, error) {
	out, err := m.command(script).CombinedOutput()
	return string(out), err
}

// run runs a shell script that must succeed.
func (m *machine) run(t *testing.T, script string) string {
	t.Helper()
	out, err := m.try(script)
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return out
}

func (m *machine) cnitool(verb string, pod int) string {
	return fmt.Sprintf("CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d cnitool %s podnet /run/netns/pod%d", verb, pod)
}

// addPod starts a pod and verifies the rules.
func (m *machine) addPod(t *testing.T) int {
	t.Helper()
	m.pods++
	pod := m.pods
	m.run(t, fmt.Sprintf("ip netns add pod%d", pod))
	t.Cleanup(func() { m.run(t, fmt.Sprintf("ip netns del pod%d", pod)) })
	m.run(t, m.cnitool("add", pod))
	m.check(t)
	return pod
}

func (m *machine) check(t *testing.T) {
	t.Helper()
	m.run(t, "ip-masq-reconciler check")
}

func (m *machine) exists(path string) bool {
	_, err := os.Lstat(m.path(path))
	return err == nil
}

// hasEntry reports whether the conflist names the plugin.
func (m *machine) hasEntry(t *testing.T) bool {
	t.Helper()
	text := assert.Must(os.ReadFile(m.path(conflistFile)))(t)
	return bytes.Contains(text, []byte(`"ip-masq"`))
}

func (m *machine) chains(t *testing.T) bool {
	t.Helper()
	return strings.Contains(m.run(t, "iptables-save -t nat; nft list ruleset"), "IP-MASQ-AGENT")
}

// files returns the files of the machine that a package manager does not keep for itself.
func (m *machine) files(t *testing.T) []string {
	t.Helper()
	var all []string
	must(t, filepath.WalkDir(m.root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, m.root)
		for _, skipped := range []string{"/proc", "/sys", "/dev", "/run", "/packages", "/var/lib/dpkg", "/var/log", "/var/cache", "/var/lib/systemd", "/var/lib/cni/networks", "/var/lib/cni/results"} {
			if name == skipped {
				return filepath.SkipDir
			}
		}
		all = append(all, name)
		return nil
	}))
	return all
}

// wantOnly fails the test if the machine has other files than before.
func (m *machine) wantOnly(t *testing.T, before []string) {
	t.Helper()
	for _, name := range m.files(t) {
		if !slices.Contains(before, name) {
			t.Errorf("%s is left", name)
		}
	}
}

// watch watches, until the function that it returns is called, that no rule is written, that the conflist
// is whole, and that there is the plugin while the conflist names it.
func (m *machine) watch(t *testing.T) (end func()) {
	t.Helper()
	commits := assert.Must(fixtures.WatchCommits())(t)
	done := make(chan struct{})
	looks := 0
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
			looks++
			if err := m.whole(); err != nil {
				t.Error(err)
				return
			}
		}
	})
	return func() {
		t.Helper()
		close(done)
		wg.Wait()
		if looks < 20 {
			t.Errorf("looked %d times", looks)
		}
		if written := commits.Since(0); len(written) > 0 {
			t.Errorf("rules were written: %v", written)
		}
		must(t, commits.Close())
	}
}

func (m *machine) whole() error {
	text, err := os.ReadFile(m.path(conflistFile))
	if err != nil {
		return err
	}
	var list struct{ Plugins []struct{ Type string } }
	if err := json.Unmarshal(text, &list); err != nil {
		return fmt.Errorf("%w in the conflist\n%s", err, text)
	}
	for _, plugin := range list.Plugins {
		// A runtime that has read this conflist executes the plugin now.
		info, err := os.Stat(m.path("/opt/cni/bin/" + plugin.Type))
		if err != nil || info.Mode()&0o111 != 0o111 || info.Size() == 0 {
			return fmt.Errorf("the conflist names %s: %v, %w", plugin.Type, info, err)
		}
	}
	return nil
}

// debArch is the machine's architecture as dpkg names it.
func debArch() string { return runtime.GOARCH }

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }
