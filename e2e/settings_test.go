// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// configMap is a directory in which kubelet mounts a ConfigMap: each file is a symbolic link into
// the current version, which the link ..data names.
type configMap struct {
	dir      string
	versions int
}

func (n *node) configMap(t *testing.T, files map[string]string) *configMap {
	t.Helper()
	m := &configMap{dir: filepath.Join(n.dir, "mounted")}
	must(t, os.Mkdir(m.dir, 0o755))
	m.update(t, files)
	return m
}

func (m *configMap) path(name string) string { return filepath.Join(m.dir, name) }

// update replaces all files in kubelet's order: the new version, the link ..data, links of new
// files, removal of obsolete links, removal of the previous version.
func (m *configMap) update(t *testing.T, files map[string]string) {
	t.Helper()
	m.versions++
	version := fmt.Sprintf("..2026_11_21_08_00_00.%09d", m.versions)
	err := os.Mkdir(m.path(version), 0o755)
	for name, text := range files {
		err = errors.Join(err, os.WriteFile(filepath.Join(m.path(version), name), []byte(text), 0o644))
	}
	before, _ := os.Readlink(m.path("..data")) // does not exist at first
	err = errors.Join(err, os.Symlink(version, m.path("..data_tmp")), os.Rename(m.path("..data_tmp"), m.path("..data")))
	for name := range files {
		if _, missing := os.Lstat(m.path(name)); missing != nil {
			err = errors.Join(err, os.Symlink(filepath.Join("..data", name), m.path(name)))
		}
	}
	entries, readErr := os.ReadDir(m.dir)
	for _, e := range entries {
		if _, exists := files[e.Name()]; !exists && e.Type() == os.ModeSymlink && e.Name() != "..data" {
			err = errors.Join(err, os.Remove(m.path(e.Name())))
		}
	}
	if before != "" {
		err = errors.Join(err, os.RemoveAll(m.path(before)))
	}
	must(t, errors.Join(err, readErr))
}

// validConfigMap returns files whose policy differs from the defaults.
func validConfigMap() map[string]string {
	return map[string]string{"ip-masq-agent": "nonMasqueradeCIDRs:\n- 1.2.3.0/24\n- 10.9.0.0/16\nresyncInterval: 1h\n"}
}

// brokenConfigMap is a way to make a valid ConfigMap invalid.
type brokenConfigMap struct {
	name       string
	breakFiles func(t *testing.T, m *configMap)
	restore    func(t *testing.T, m *configMap) // nil: write the valid files again
	msgs       []string
}

func brokenConfigMaps() []brokenConfigMap {
	invalid := func(name, text string, msgs ...string) brokenConfigMap {
		return brokenConfigMap{name: name, msgs: append(msgs, "ip-masq-agent"),
			breakFiles: func(t *testing.T, m *configMap) { m.update(t, map[string]string{"ip-masq-agent": text}) }}
	}
	secondFile := func(name, text string, msgs ...string) brokenConfigMap {
		return brokenConfigMap{name: name, msgs: append(msgs, "ip-masq-second"), breakFiles: func(t *testing.T, m *configMap) {
			files := maps.Clone(validConfigMap())
			files["ip-masq-second"] = text
			m.update(t, files)
		}}
	}
	// extraFile adds an invalid file to the version, and replaces ..data with a link to it.
	extraFile := func(name string, spoil func(path string) error, msgs ...string) brokenConfigMap {
		return brokenConfigMap{name: name, msgs: append(msgs, "ip-masq-strange"), breakFiles: func(t *testing.T, m *configMap) {
			version, err := os.Readlink(m.path("..data"))
			must(t, errors.Join(err, spoil(m.path("..data/ip-masq-strange")),
				os.Symlink(version, m.path("..data_tmp")), os.Rename(m.path("..data_tmp"), m.path("..data"))))
		}}
	}
	large := "# " + strings.Repeat("x", 2<<20) + "\n"
	return []brokenConfigMap{
		invalid("host bits", "nonMasqueradeCIDRs:\n- 1.2.3.0/24\n- 10.9.0.1/16\n", "ip-masq-agent:1: ", "nonMasqueradeCIDRs[1]"),
		invalid("null", "nonMasqueradeCIDRs: [null]\n", "nonMasqueradeCIDRs[0]", "null"),
		invalid("IPv6 without enableIPv6", "nonMasqueradeCIDRs: ['fd00::/8']\n", "nonMasqueradeCIDRs[0]", "fd00::/8", "enableIPv6"),
		invalid("invalid YAML", "nonMasqueradeCIDRs: [1.2.3.0/24\n"),
		invalid("2 MiB", large+validConfigMap()["ip-masq-agent"], "1024 KiB"),
		secondFile("conflict with a second file", "masqueradeCIDRs: [1.2.3.0/24]\n", "masqueradeCIDRs[0]", "1.2.3.0/24", "remove one of the two"),
		secondFile("truncated second file", `{"randomFully": tru`),
		extraFile("FIFO", func(path string) error { return syscall.Mkfifo(path, 0o644) }, "fix it, remove it"),
		extraFile("directory", func(path string) error { return os.Mkdir(path, 0o755) }, "fix it, remove it"),
		extraFile("extra file of 2 MiB", func(path string) error { return os.WriteFile(path, []byte(large), 0o644) }, "1024 KiB"),
		extraFile("dangling symbolic link", func(path string) error { return os.Symlink("nowhere", path) }, "fix it, remove it"),
		extraFile("symbolic link to itself", func(path string) error { return os.Symlink("ip-masq-strange", path) }, "fix it, remove it"),
		extraFile("device", func(path string) error { return os.Symlink("/dev/zero", path) }, "fix it, remove it"),
		{name: "dangling ..data", msgs: []string{"..data leads to nothing", "mount the ConfigMap again"},
			breakFiles: func(t *testing.T, m *configMap) {
				must(t, errors.Join(os.Symlink("..gone", m.path("..data_tmp")), os.Rename(m.path("..data_tmp"), m.path("..data"))))
			}},
		{name: "file in place of the directory", msgs: []string{"not a directory", "name the directory"},
			breakFiles: func(t *testing.T, m *configMap) {
				must(t, errors.Join(os.Rename(m.dir, m.dir+".away"), os.WriteFile(m.dir, nil, 0o644)))
			},
			restore: func(t *testing.T, m *configMap) {
				must(t, errors.Join(os.Remove(m.dir), os.Rename(m.dir+".away", m.dir)))
			}},
	}
}

var must = assert.NoError

// externalHost adds a host outside of any CNI network whose packets the node routes.
func (n *node) externalHost(t *testing.T) senders {
	t.Helper()
	host := n.AddPod(t, "lone", transit4, transit6)
	return senders{"pod": {host, host.Addrs}}
}

// wantValidPolicy fails the test unless packets follow the policy of validConfigMap.
func (n *node) wantValidPolicy(t *testing.T, hosts senders) {
	t.Helper()
	hosts.verdicts(t, n, false, map[string]string{"pod": "1.2.3.4 10.9.9.9"})
	hosts.verdicts(t, n, true, map[string]string{"pod": "1.2.4.1 10.8.0.1"})
}

// agentArgs returns the flags for agent files in a directory, with the node's backend.
func (n *node) agentArgs(dir string) []string {
	return []string{"--agent-config-dir", dir, "--backend", n.backend.setting}
}

// eventually waits for a condition. It fails the test after timelimit.Wait.
func (n *node) eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	if !timelimit.Await(timelimit.Wait, condition) {
		t.Fatalf("no %s; rules:\n%s", what, n.rules(t))
	}
}

// wantFilesValid fails the test unless the metrics source_valid of the agent files and ready have
// the given value.
func (d *daemon) wantFilesValid(t *testing.T, want float64) {
	t.Helper()
	d.wantMetric(t, want, "source_valid", `source="agent-files"`)
	d.wantMetric(t, want, "ready")
}

// TestBrokenConfigMap makes a ConfigMap invalid in each way while the reconciler runs. It checks
// that the last valid policy stays in force, that the node is not ready meanwhile, and that nothing
// is written.
func TestBrokenConfigMap(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		hosts, m := n.externalHost(t), n.configMap(t, validConfigMap())
		d := n.startReconciler(t, n.agentArgs(m.dir)...).untilReady(t)
		d.wantFilesValid(t, 1)
		n.wantValidPolicy(t, hosts)
		for _, b := range brokenConfigMaps() {
			t.Run(b.name, func(t *testing.T) {
				rules, documents, generation := n.ruleset(t), n.documentStamps(t), n.generation(t)
				b.breakFiles(t, m)
				d.untilUnready(t, append(slices.Clone(b.msgs), "source: ", m.dir)...)
				d.wantFilesValid(t, 0)
				n.wantValidPolicy(t, hosts)
				if b.restore == nil {
					m.update(t, validConfigMap())
				} else {
					b.restore(t, m)
				}
				d.untilReady(t)
				d.wantFilesValid(t, 1)
				n.wantValidPolicy(t, hosts)
				wantSame(t, "rules", n.ruleset(t), rules)
				wantSame(t, "documents", n.documentStamps(t), documents)
				wantSame(t, "generation", n.generation(t), generation)
			})
			if n.backend.variant != "" && b.name == "null" {
				break // the other cases do not depend on the backend
			}
		}
		t.Run("deleted key", func(t *testing.T) {
			// An empty ConfigMap is valid: the defaults apply.
			m.update(t, nil)
			n.eventually(t, "the defaults", func() bool { return !strings.Contains(n.rules(t), "1.2.3.0/24") })
			d.untilReady(t)
			hosts.verdicts(t, n, false, map[string]string{"pod": "10.8.0.1 192.168.0.1"})
			hosts.verdicts(t, n, true, map[string]string{"pod": "1.2.3.4"})
			m.update(t, validConfigMap())
			n.eventually(t, "the file again", func() bool { return strings.Contains(n.rules(t), "1.2.3.0/24") })
			n.wantValidPolicy(t, hosts)
		})
	})
}

// TestMemoryOfAgentFiles checks that no agent file below the size limit makes the reconciler exceed
// the memory limit of the DaemonSets.
func TestMemoryOfAgentFiles(t *testing.T) {
	const limitKiB = 256 << 10
	for name, text := range map[string]string{
		"numbers":   "nonMasqueradeCIDRs: [" + strings.Repeat("1,", 480_000) + "]\n",
		"nothing":   "nonMasqueradeCIDRs: [" + strings.Repeat("~,", 480_000) + "]\n",
		"lists":     "x: [" + strings.Repeat("[],", 330_000) + "]\n",
		"keys":      "x:\n " + strings.Join(interfaceNames("k", 90_000), ": 1\n ") + ": 1\n",
		"documents": strings.Repeat("---\n#\n", 160_000),
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, backends()[0])
			n.agentFile(t, "ip-masq", text)
			c := n.reconcilerCommand(n.timeout(t), t, "once")
			run(t, c)
			if most := c.ProcessState.SysUsage().(*syscall.Rusage).Maxrss; most > limitKiB {
				t.Errorf("memory %d KiB, limit %d KiB", most, limitKiB)
			}
		})
	}
}

// settingsFile writes reconciler.toml atomically, as configuration management does, and returns its
// path.
func (n *node) settingsFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(n.dir, "etc", "reconciler.toml")
	must(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path+".next", []byte(text), 0o644), os.Rename(path+".next", path)))
	return path
}

// exemptSettings returns a reconciler.toml whose policy exempts a prefix. Its interval is long
// enough never to trigger a sync.
func exemptSettings(prefix string) string {
	return fmt.Sprintf("resync_interval = \"1h\"\n[agent]\nnonMasqueradeCIDRs = [%q]\n", prefix)
}

// TestBrokenSettingsAtStart checks that the reconciler runs with the settings of its flags.
func TestBrokenSettingsAtStart(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	all, m := n.externalHost(t), n.configMap(t, validConfigMap())
	path := n.settingsFile(t, "resync_interval = \"1h\"\n[agent]\nnonMasqueradeCIDRs = [\"10.9.0.0/33\"]\n")
	d := n.startReconciler(t, "--config", path, "--agent-config-dir", m.dir)
	d.untilUnready(t, "settings: ", path+":3", "nonMasqueradeCIDRs[0]", "10.9.0.0/33")
	if code, body, err := d.get(d.healthAddress, "/livez"); err != nil || code != http.StatusOK {
		t.Errorf("/livez: %d %s %v", code, body, err)
	}
	n.wantValidPolicy(t, all)
	n.settingsFile(t, exemptSettings("20.0.0.0/8"))
	d.untilReady(t)
	n.wantValidPolicy(t, all)
	all.verdicts(t, n, false, map[string]string{"pod": "20.1.1.1"})
}

// TestSettingsChange checks that changes of the file take effect without a restart, whether it is
// renamed or written in place, and however quickly changes follow one another.
func TestSettingsChange(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	all := n.externalHost(t)
	path := n.settingsFile(t, exemptSettings("20.0.0.0/8"))
	d := n.startReconciler(t, "--config", path).untilReady(t)
	soon := func(prefix string) {
		t.Helper()
		n.eventually(t, prefix, func() bool { return strings.Contains(n.rules(t), prefix) })
	}
	for i := range 10 {
		prefix := fmt.Sprintf("20.%d.0.0/16", i)
		n.settingsFile(t, exemptSettings(prefix))
		soon(prefix)
	}
	// Written in place, the file is empty for a moment, which is valid.
	for i := range 10 {
		prefix := fmt.Sprintf("21.%d.0.0/16", i)
		must(t, os.WriteFile(path, nil, 0o644))
		time.Sleep(time.Duration(i) * 3 * time.Millisecond)
		must(t, os.WriteFile(path, []byte(exemptSettings(prefix)), 0o644))
		soon(prefix)
	}
	// Many changes in a row.
	for i := range 30 {
		n.settingsFile(t, exemptSettings(fmt.Sprintf("22.%d.0.0/16", i)))
		time.Sleep(time.Duration(i%7) * 5 * time.Millisecond)
	}
	soon("22.29.0.0/16")
	all.verdicts(t, n, false, map[string]string{"pod": "22.29.1.1"})

	m := n.configMap(t, validConfigMap())
	n.settingsFile(t, fmt.Sprintf("agent_config_dir = %q\n", m.dir))
	soon("1.2.3.0/24")
	n.wantValidPolicy(t, all)
	n.settingsFile(t, fmt.Sprintf("agent_config_dir = %q\n[agent]\nmasqChain = \"OTHER\"\n", m.dir))
	soon("masq-OTHER")
	n.wantJumps(t, "OTHER", 1, 0)
	n.wantJumps(t, "IP-MASQ-AGENT", 0, 0)
	n.wantValidPolicy(t, all)
	d.untilReady(t)
	n.settingsFile(t, exemptSettings("22.0.0.0/8")+"[conflist]\nmanage = true\n")
	d.untilUnready(t, "conflist: waiting for the main CNI plugin's network: find the network in "+n.cni.ConfDir)
	n.settingsFile(t, exemptSettings("22.0.0.0/8"))
	d.untilReady(t)
	if stale := strings.Count(d.log(), "source updated"); stale < 20 {
		t.Errorf("the log has %d changes of settings", stale)
	}
}

// TestSettingsChangeAddresses checks that the listeners follow the addresses in the file.
func TestSettingsChangeAddresses(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	first, second := n.unusedAddress(), n.unusedAddress()
	path := n.settingsFile(t, fmt.Sprintf("health_listen = %q\n", first))
	c := n.reconcilerCommand(t.Context(), t, "run", "--config", path)
	must(t, c.Start())
	defer func() { must(t, c.Process.Kill()); _ = c.Wait() }()
	n.eventually(t, "the first address", func() bool { return n.isReady(first) })
	n.settingsFile(t, fmt.Sprintf("health_listen = %q\n", second))
	n.eventually(t, "the second address", func() bool { return n.isReady(second) })
	if n.isReady(first) {
		t.Error("the reconciler still listens on the first address")
	}
	n.settingsFile(t, fmt.Sprintf("health_listen = %q\n", first))
	n.eventually(t, "the first address again", func() bool { return n.isReady(first) })
}
