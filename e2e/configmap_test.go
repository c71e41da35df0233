// SPDX-License-Identifier: Apache-2.0

package e2e

import (
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

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// configMap is a directory into which a kubelet mounts a ConfigMap: the files are
// links to those in a version, and a link that is renamed says which one holds.
type configMap struct {
	dir      string
	versions int
}

func (n *node) configMap(t *testing.T, files map[string]string) *configMap {
	t.Helper()
	m := &configMap{dir: filepath.Join(n.dir, "mounted")}
	if err := os.Mkdir(m.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	m.update(t, files)
	return m
}

func (m *configMap) path(name string) string { return filepath.Join(m.dir, name) }

// put has these files hold, and no others, in the order in which a kubelet does
// it: the version, the link to it, links to new files, those to files that are
// gone, the earlier version.
func (m *configMap) update(t *testing.T, files map[string]string) {
	t.Helper()
	m.versions++
	version := fmt.Sprintf("..2026_11_21_08_00_00.%09d", m.versions)
	err := os.Mkdir(m.path(version), 0o755)
	for name, text := range files {
		err = firstOf(err, os.WriteFile(filepath.Join(m.path(version), name), []byte(text), 0o644))
	}
	before, _ := os.Readlink(m.path("..data")) // there is none at first
	err = firstOf(err, os.Symlink(version, m.path("..data_tmp")), os.Rename(m.path("..data_tmp"), m.path("..data")))
	for name := range files {
		if _, missing := os.Lstat(m.path(name)); missing != nil {
			err = firstOf(err, os.Symlink(filepath.Join("..data", name), m.path(name)))
		}
	}
	entries, readErr := os.ReadDir(m.dir)
	for _, e := range entries {
		if _, holds := files[e.Name()]; !holds && e.Type() == os.ModeSymlink && e.Name() != "..data" {
			err = firstOf(err, os.Remove(m.path(e.Name())))
		}
	}
	if before != "" {
		err = firstOf(err, os.RemoveAll(m.path(before)))
	}
	if err = firstOf(err, readErr); err != nil {
		t.Fatal(err)
	}
}

// sound is a ConfigMap that says what no default does.
func validConfigMap() map[string]string {
	return map[string]string{"ip-masq-agent": "nonMasqueradeCIDRs:\n- 1.2.3.0/24\n- 10.9.0.0/16\nresyncInterval: 1h\n"}
}

// breakage is a way to spoil what a ConfigMap was.
type brokenConfigMap struct {
	name       string
	breakFiles func(t *testing.T, m *configMap)
	restore    func(t *testing.T, m *configMap) // nil: put what is sound
	says       []string
}

func brokenConfigMaps() []brokenConfigMap {
	text := func(name, text string, says ...string) brokenConfigMap {
		return brokenConfigMap{name: name, says: append(says, "ip-masq-agent"),
			breakFiles: func(t *testing.T, m *configMap) { m.update(t, map[string]string{"ip-masq-agent": text}) }}
	}
	second := func(name, text string, says ...string) brokenConfigMap {
		return brokenConfigMap{name: name, says: append(says, "ip-masq-second"), breakFiles: func(t *testing.T, m *configMap) {
			files := maps.Clone(validConfigMap())
			files["ip-masq-second"] = text
			m.update(t, files)
		}}
	}
	// beside spoils the directory with something that no ConfigMap has.
	beside := func(name string, spoil func(path string) error, says ...string) brokenConfigMap {
		return brokenConfigMap{name: name, says: append(says, "ip-masq-strange"),
			breakFiles: func(t *testing.T, m *configMap) { must(t, spoil(m.path("ip-masq-strange"))) },
			restore:    func(t *testing.T, m *configMap) { must(t, os.RemoveAll(m.path("ip-masq-strange"))) }}
	}
	large := "# " + strings.Repeat("x", 2<<20) + "\n"
	return []brokenConfigMap{
		text("host bits", "nonMasqueradeCIDRs:\n- 1.2.3.0/24\n- 10.9.0.1/16\n", "ip-masq-agent:3: ", "nonMasqueradeCIDRs[1]", "did you mean 10.9.0.0/16?"),
		text("null", "nonMasqueradeCIDRs: [null]\n", "nonMasqueradeCIDRs[0]", "null"),
		text("IPv6 that is not on", "nonMasqueradeCIDRs: ['fd00::/8']\n", "nonMasqueradeCIDRs[0]", "fd00::/8", "enableIPv6"),
		text("no YAML", "nonMasqueradeCIDRs: [1.2.3.0/24\n"),
		text("2 MiB", large+validConfigMap()["ip-masq-agent"], "1024 KiB"),
		second("another file", "masqueradeCIDRs: [1.2.3.0/24]\n", "masqueradeCIDRs[0]", "1.2.3.0/24", "remove one of the two"),
		second("another file that is torn", `{"randomFully": tru`),
		beside("FIFO", func(path string) error { return syscall.Mkfifo(path, 0o644) }, "fix it, remove it"),
		beside("directory", func(path string) error { return os.Mkdir(path, 0o755) }, "fix it, remove it"),
		beside("2 MiB beside", func(path string) error { return os.WriteFile(path, []byte(large), 0o644) }, "1024 KiB"),
		beside("dangling link", func(path string) error { return os.Symlink("nowhere", path) }, "fix it, remove it"),
		beside("link to itself", func(path string) error { return os.Symlink("ip-masq-strange", path) }, "fix it, remove it"),
		beside("device", func(path string) error { return os.Symlink("/dev/zero", path) }, "fix it, remove it"),
		{name: "version that is gone", says: []string{"..data leads to nothing", "mount the ConfigMap again"},
			breakFiles: func(t *testing.T, m *configMap) {
				must(t, firstOf(os.Symlink("..gone", m.path("..data_tmp")), os.Rename(m.path("..data_tmp"), m.path("..data"))))
			}},
		{name: "file for a directory", says: []string{"not a directory", "name the directory"},
			breakFiles: func(t *testing.T, m *configMap) {
				must(t, firstOf(os.Rename(m.dir, m.dir+".away"), os.WriteFile(m.dir, nil, 0o644)))
			},
			restore: func(t *testing.T, m *configMap) { must(t, firstOf(os.Remove(m.dir), os.Rename(m.dir+".away", m.dir))) }},
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// lone is a host whose packets pass the node, without any network of CNI.
func (n *node) externalHost(t *testing.T) senders {
	t.Helper()
	host := topology.Must(n.AddPod("lone", transit4, transit6))(t)
	return senders{"pod": {host, host.Addrs}}
}

// asSound fails the test unless packets go as sound has it.
func (n *node) wantValidPolicy(t *testing.T, all senders) {
	t.Helper()
	all.verdicts(t, n, false, map[string]string{"pod": "1.2.3.4 10.9.9.9"})
	all.verdicts(t, n, true, map[string]string{"pod": "1.2.4.1 10.8.0.1"})
}

// soundStatement is what sound says, as it is stored.
func validPolicy() policy.SourcePolicy {
	return policy.SourcePolicy{Chain: policy.DefaultChain, NonMasqueradeCIDRs: prefixes("1.2.3.0/24", "10.9.0.0/16")}
}

// agentArgs are flags for the files in a directory, in the node's form.
func (n *node) agentArgs(dir string) []string {
	return []string{"--agent-config-dir", dir, "--backend", n.backend.setting}
}

// shortly is how long a change of files may take to be heard of: files are read
// once they are calm, and after a second in any case, where others write beside
// them all the time. A link to a device makes /dev such a place.
const fileChangeTimeout = 2 * time.Second

// soon waits until something holds, and fails the test if it does not shortly.
func (n *node) eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for start := time.Now(); !holds(); time.Sleep(2 * time.Millisecond) {
		if timelimit.Exceeded(time.Since(start), fileChangeTimeout) {
			t.Fatalf("%s: not within %s; rules:\n%s", what, time.Since(start), n.rules(t))
		}
	}
}

// soonReady waits until the node is ready, which it has to be shortly.
func (d *daemon) eventuallyReady(t *testing.T) {
	t.Helper()
	d.within(t, fileChangeTimeout, "readiness", func() bool {
		code, _ := d.ready()
		return code == http.StatusOK
	})
}

// soonUnready waits until the node is not ready for these reasons, which it has
// to be shortly.
func (d *daemon) eventuallyUnready(t *testing.T, says ...string) {
	t.Helper()
	d.within(t, fileChangeTimeout, fmt.Sprintf("unreadiness that says %q", says), func() bool {
		code, body := d.ready()
		return code == http.StatusServiceUnavailable && !slices.ContainsFunc(says, func(s string) bool { return !strings.Contains(body, s) })
	})
}

// filesValid fails the test unless the metrics tell that the agent files are
// valid or not.
func (d *daemon) wantFilesValid(t *testing.T, want float64) {
	t.Helper()
	if got := d.metric(t, "source_valid", `source="agent-files"`); got != want {
		t.Errorf("source_valid of the agent files is %v, want %v", got, want)
	}
	if got := d.metric(t, "ready"); got != want {
		t.Errorf("the metric ready is %v, want %v", got, want)
	}
}

// TestBrokenConfigMap breaks a ConfigMap that was sound in every way while the
// reconciler runs. What it said last stays in force, until it is mended.
func TestBrokenConfigMap(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		all, m := n.externalHost(t), n.configMap(t, validConfigMap())
		d := n.startReconciler(t, n.agentArgs(m.dir)...)
		d.eventuallyReady(t)
		d.wantFilesValid(t, 1)
		n.wantValidPolicy(t, all)
		for _, b := range brokenConfigMaps() {
			t.Run(b.name, func(t *testing.T) {
				rules, documents, generation := n.ruleset(t), n.documentStamps(t), n.generation(t)
				b.breakFiles(t, m)
				d.eventuallyUnready(t, append(slices.Clone(b.says), "source: ", m.dir)...)
				d.wantFilesValid(t, 0)
				n.wantValidPolicy(t, all)
				if b.restore == nil {
					m.update(t, validConfigMap())
				} else {
					b.restore(t, m)
				}
				d.eventuallyReady(t)
				d.wantFilesValid(t, 1)
				n.wantValidPolicy(t, all)
				if now := n.ruleset(t); now != rules {
					t.Errorf("rules changed:\n%s\nwere:\n%s", now, rules)
				}
				if now := n.documentStamps(t); now != documents {
					t.Errorf("documents were written:\n%s\nwere:\n%s", now, documents)
				}
				if now := n.generation(t); now != generation {
					t.Errorf("generation moved from %d to %d", generation, now)
				}
			})
		}
		t.Run("deleted key", func(t *testing.T) {
			// That is no mistake: an empty ConfigMap says nothing, and the defaults hold.
			m.update(t, nil)
			n.eventually(t, "the defaults", func() bool { return !strings.Contains(n.rules(t), "1.2.3.0/24") })
			d.eventuallyReady(t)
			all.verdicts(t, n, false, map[string]string{"pod": "10.8.0.1 192.168.0.1"})
			all.verdicts(t, n, true, map[string]string{"pod": "1.2.3.4"})
			m.update(t, validConfigMap())
			n.eventually(t, "the file again", func() bool { return strings.Contains(n.rules(t), "1.2.3.0/24") })
			n.wantValidPolicy(t, all)
		})
	})
}

// TestBrokenConfigMapAtStart: what was good before holds, rules and all, though
// the kernel has forgotten them. Where nothing was, nothing is made.
func TestBrokenConfigMapAtStart(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		all, m := n.externalHost(t), n.configMap(t, nil)
		for _, b := range brokenConfigMaps() {
			t.Run(b.name, func(t *testing.T) {
				m.update(t, validConfigMap())
				b.breakFiles(t, m)
				says := append(slices.Clone(b.says), "source: ", m.dir)
				d := n.startReconciler(t, n.agentArgs(m.dir)...)
				d.eventuallyUnready(t, says...)
				d.wantFilesValid(t, 0)
				n.wantNoChain(t, "IP-MASQ-AGENT")
				all.verdicts(t, n, false, map[string]string{"pod": "1.2.4.1"})
				d.stop(t)

				// Of another time there is something.
				n.storeAgentFiles(t, validPolicy())
				d = n.startReconciler(t, n.agentArgs(m.dir)...)
				d.eventuallyUnready(t, says...)
				d.wantFilesValid(t, 0)
				n.wantValidPolicy(t, all)
				n.flush(t)
				n.eventually(t, "a repair", func() bool { return strings.Contains(n.rules(t), "1.2.3.0/24") || n.backend.variant == "legacy" })

				if b.restore == nil {
					m.update(t, validConfigMap())
				} else {
					b.restore(t, m)
				}
				d.eventuallyReady(t)
				d.wantFilesValid(t, 1)
				n.wantValidPolicy(t, all)
				d.stop(t)
				n.removeRulesAndState(t)
			})
			if n.backend.variant != "" && b.name == "null" {
				break // how it broke is the same whatever the form
			}
		}
	})
}

// TestMemoryOfAgentFiles: a container that has more memory than its limit is killed, and
// again after each start. No file of the size that is read makes the reconciler need that.
func TestMemoryOfAgentFiles(t *testing.T) {
	const limitKiB = 256 << 10 // of the DaemonSets
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
				t.Errorf("took %d KiB of memory, more than %d", most, limitKiB)
			}
		})
	}
}
