// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// uninstalledNode is a node without the ip-masq plugin: its plugin directory has only the reference
// plugins, its conflist only the bridge. The plugin entry that install adds is in a file, with the
// node's backend.
type uninstalledNode struct {
	*node
	bin, conflistFile, entry string
	original                 []byte // conflist before install
}

func newUninstalledNode(t *testing.T, f backend) *uninstalledNode {
	t.Helper()
	n := newNode(t, f)
	b := &uninstalledNode{node: n, bin: filepath.Join(n.dir, "opt"), entry: filepath.Join(n.dir, "entry.json")}
	n.write(t, "podnet", n.bridge("podnet"))
	b.conflistFile = filepath.Join(n.cni.ConfDir, "10-podnet.conflist")
	b.original = readFile(t, b.conflistFile)
	n.cni.Path = []string{b.bin, n.cni.Path[1]}
	text, err := json.Marshal(n.entry(object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}))
	must(t, errors.Join(err, os.Mkdir(b.bin, 0o755), os.WriteFile(b.entry, text, 0o600)))
	return b
}

func (b *uninstalledNode) binary() string { return filepath.Join(b.bin, "ip-masq") }

// args returns a command with the flags of install and uninstall.
func (b *uninstalledNode) args(command string, args ...string) []string {
	return append([]string{command, "--cni-bin-dir", b.bin, "--conflist-entry-file", b.entry}, args...)
}

func (b *uninstalledNode) install(t *testing.T, plugin string) {
	t.Helper()
	if stdout, stderr, code := b.reconciler(t, b.args("install", "--plugin", plugin)...); code != 0 || stderr != "" {
		t.Fatalf("install: exit code %d\n%s%s", code, stdout, stderr)
	}
}

func (b *uninstalledNode) uninstall(t *testing.T, args ...string) {
	t.Helper()
	if stdout, stderr, code := b.reconciler(t, b.args("uninstall", args...)...); code != 0 || stderr != "" {
		t.Fatalf("uninstall: exit code %d\n%s%s", code, stdout, stderr)
	}
}

// wantUninstalled fails the test unless the node is as before install.
func (b *uninstalledNode) wantUninstalled(t *testing.T, before snapshot) {
	t.Helper()
	b.wantRestored(t, before)
	if have := readFile(t, b.conflistFile); !bytes.Equal(have, b.original) {
		t.Errorf("the conflist is\n%s", have)
	}
	if have := append(fileNames(t, b.bin), fileNames(t, b.cni.ConfDir)...); len(have) != 1 {
		t.Errorf("unexpected files: %q", have)
	}
}

func fileNames(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var list []string
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

// runPod creates a pod and deletes it.
func (b *uninstalledNode) runPod(t *testing.T) {
	t.Helper()
	b.delPod(t, b.pod(t, "podnet"))
}

func (b *uninstalledNode) delPod(t *testing.T, p *pod) {
	t.Helper()
	succeeds(t, "DEL")(b.del(t, "podnet", p))
}

// delPodFromCache deletes a pod with the cached conflist of its ADD, as CRI-O and podman do.
func (b *uninstalledNode) delPodFromCache(t *testing.T, p *pod) {
	t.Helper()
	files, err := filepath.Glob(b.own("/var/lib/cni/results/podnet-*"))
	must(t, err)
	cnitool := *b.cni
	cnitool.ConfDir = filepath.Join(t.TempDir(), "cached")
	for _, file := range files {
		var cached struct {
			Config []byte
			Netns  string
		}
		must(t, json.Unmarshal(readFile(t, file), &cached))
		if cached.Netns != p.Path {
			continue
		}
		must(t, cnitool.Write("10-podnet.conflist", string(cached.Config)))
		if r := topology.Must(cnitool.Del(b.timeout(t), "podnet", p.Host))(t); r.ExitCode != 0 {
			t.Fatalf("DEL with the cached conflist: exit code %d\n%s%s", r.ExitCode, r.Stdout, r.Stderr)
		}
		return
	}
	t.Fatalf("no result is cached for %s among %v", p.Path, files)
}

// TestInstallAndUninstall installs the plugin, runs pods and uninstalls it. It checks that
// uninstall keeps the plugin and the rules while pods with its entry exist, that pods start and end
// at any time, and that the second uninstall leaves nothing.
func TestInstallAndUninstall(t *testing.T) {
	t.Parallel()
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			b := newUninstalledNode(t, f)
			before := b.snapshot(t)
			b.runPod(t)
			b.install(t, b.plugin(t))
			first, second := b.pod(t, "podnet"), b.pod(t, "podnet")
			b.runPod(t)
			b.wantSays(t, 0, nil, "check")
			b.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
			rules := b.ruleset(t)

			for range 2 {
				b.wantSays(t, 1, []string{"the plugin stays", "/var/lib/cni/results/podnet-"}, b.args("uninstall")...)
				if have := readFile(t, b.conflistFile); !bytes.Equal(have, b.original) {
					t.Errorf("the conflist is\n%s", have)
				}
				if have := b.ruleset(t); have != rules {
					t.Errorf("rules changed while pods exist:\n%s", have)
				}
				b.runPod(t)
			}
			b.delPodFromCache(t, first)
			b.delPodFromCache(t, second)
			b.uninstall(t)
			b.wantUninstalled(t, before)
			b.runPod(t)
			b.uninstall(t)
			b.wantUninstalled(t, before)
		})
	}
}

// TestUninstallUnderContainerd checks that uninstall does not wait for pods of containerd, which
// ends pods with the current conflist, and that these pods end without the plugin.
func TestUninstallUnderContainerd(t *testing.T) {
	t.Parallel()
	b := newUninstalledNode(t, backends()[0])
	before := b.snapshot(t)
	b.install(t, b.plugin(t))
	p := b.pod(t, "podnet")
	files, err := filepath.Glob(b.own("/var/lib/cni/results/podnet-*"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	var cached struct{ ContainerID string }
	must(t, json.Unmarshal(readFile(t, files[0]), &cached))
	task := filepath.Join(b.own("/run/containerd"), "io.containerd.runtime.v2.task/k8s.io", cached.ContainerID)
	must(t, os.MkdirAll(task, 0o711))
	b.uninstall(t)
	b.wantUninstalled(t, before)
	b.delPod(t, p)
	b.runPod(t)
	b.wantUninstalled(t, before)
}

// pluginBuild returns a copy of the plugin with other bytes, as another version. Bytes after the
// end of the executable have no effect.
func (b *uninstalledNode) pluginBuild(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(b.dir, name)
	must(t, os.WriteFile(path, append(readFile(t, b.plugin(t)), name...), 0o755))
	return path
}

// TestInstallKilled kills install and uninstall 80 times at random points. It checks that the
// runtime can always load its configuration and run the plugins in it, and that later commands
// succeed.
func TestInstallKilled(t *testing.T) {
	t.Parallel()
	b := newUninstalledNode(t, backends()[0])
	before := b.snapshot(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	plugins := []string{b.pluginBuild(t, "one"), b.pluginBuild(t, "two")}
	start := time.Now()
	b.install(t, plugins[0])
	duration := max(time.Since(start), 20*time.Millisecond)

	done, watchErr := make(chan struct{}), make(chan error, 1)
	go func() { watchErr <- b.watch(done, plugins) }()
	const wantKilled, maxRounds = 80, 320
	killed, named, leftovers := 0, 0, 0
	for round := 0; (killed < wantKilled || named == 0) && round < maxRounds; round++ {
		args := b.args("install", "--plugin", plugins[random.IntN(2)])
		if random.IntN(2) == 0 {
			args = b.args("uninstall")
		}
		c := b.reconcilerCommand(b.timeout(t), t, args...)
		var out bytes.Buffer
		c.Stdout, c.Stderr = &out, &out
		must(t, c.Start())
		start := time.Now()
		time.Sleep(time.Duration(random.Int64N(int64(duration) * 3 / 4)))
		_ = c.Process.Kill() // the process may have ended
		switch err := c.Wait(); {
		case err == nil: // the machine is faster than at the last measurement
			duration = max(time.Since(start), 20*time.Millisecond)
		case c.ProcessState.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL:
			killed++
		default:
			t.Fatalf("%v: %v\n%s", args, err, out.Bytes())
		}
		isNamed, err := b.checkConfig(plugins)
		if err != nil {
			t.Fatalf("round %d, after a killed %s: %v", round, args[0], err)
		}
		if isNamed {
			named++
		}
		for _, name := range append(fileNames(t, b.bin), fileNames(t, b.cni.ConfDir)...) {
			if strings.HasSuffix(name, ".tmp") {
				leftovers++
			}
		}
		if round%30 == 0 {
			b.runPod(t)
		}
		if round%40 == 39 {
			b.install(t, plugins[round%2])
			if have := fileNames(t, b.bin); len(have) != 1 {
				t.Errorf("unexpected files: %q", have)
			}
			b.runPod(t)
		}
	}
	close(done)
	if err := <-watchErr; err != nil {
		t.Error(err)
	}
	t.Logf("%d killed; afterwards %d conflists with the plugin and %d temporary files", killed, named, leftovers)
	if killed < wantKilled || named == 0 {
		t.Error("too few kills, or none beside an entry")
	}
	b.uninstall(t)
	b.wantUninstalled(t, before)
}

// watch calls checkConfig until done is closed.
func (b *uninstalledNode) watch(done <-chan struct{}, plugins []string) error {
	for {
		select {
		case <-done:
			return nil
		case <-time.After(time.Millisecond):
		}
		if _, err := b.checkConfig(plugins); err != nil {
			return err
		}
	}
}

// checkConfig fails unless the runtime can load its configuration, as libcni does, and run the
// plugins in it.
func (b *uninstalledNode) checkConfig(plugins []string) (named bool, err error) {
	if named, err = b.namesPlugin(); err != nil || !named {
		return false, err
	}
	data, err := os.ReadFile(b.binary())
	if errors.Is(err, os.ErrNotExist) {
		if still, e := b.namesPlugin(); e == nil && !still {
			return false, nil // uninstall has removed the entry and then the plugin
		}
		return named, fmt.Errorf("the conflist names a plugin that is not there: %w", err)
	}
	info, e := os.Stat(b.binary())
	switch {
	case errors.Is(e, os.ErrNotExist):
		return named, nil // uninstall has removed the plugin; the next check verifies the entry
	case err != nil || e != nil:
		return named, errors.Join(err, e)
	case info.Mode() != 0o755:
		return named, fmt.Errorf("the plugin has mode %v", info.Mode())
	}
	for _, p := range plugins {
		build, err := os.ReadFile(p)
		if err != nil || bytes.Equal(data, build) {
			return named, err
		}
	}
	return named, fmt.Errorf("the plugin is not one of the builds: %d bytes", len(data))
}

// namesPlugin reports whether the conflist has the plugin entry, after the bridge.
func (b *uninstalledNode) namesPlugin() (bool, error) {
	dir, err := config.ReadConfDir(b.cni.ConfDir)
	if err := errors.Join(err, dir.Err()); err != nil {
		return false, fmt.Errorf("the runtime cannot load its configuration: %w", err)
	}
	if len(dir.Conflists) != 1 || dir.Conflists[0].File != b.conflistFile {
		return false, fmt.Errorf("the runtime would load %+v", dir.Conflists)
	}
	entries := dir.Conflists[0].Entries
	if len(entries) > 1 || len(entries) == 1 && (entries[0].Index != 1 || entries[0].Err != nil) {
		return false, fmt.Errorf("the conflist has %+v", entries)
	}
	return len(entries) == 1, nil
}

// TestInstallWithPluginFile checks that install takes the directory of the conflists from plugin.toml, and adds no entry
// while that file is bad, because no pod would start.
func TestInstallWithPluginFile(t *testing.T) {
	t.Parallel()
	b := newUninstalledNode(t, backends()[0])
	const pluginFile = "/etc/ip-masq/plugin.toml"
	write := func(line string) { must(t, os.WriteFile(b.own(pluginFile), []byte(b.pluginFile(line)), 0o600)) }
	write("bogus = 1")
	b.wantSays(t, 1, []string{"bogus: is not a known key", pluginFile}, b.args("install", "--plugin", b.plugin(t))...)
	if have := readFile(t, b.conflistFile); !bytes.Equal(have, b.original) {
		t.Errorf("the conflist is\n%s", have)
	}
	b.runPod(t)
	write("")
	b.install(t, b.plugin(t))
	b.runPod(t)
}
