// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist/install"
)

// bootUnit is what the unit file says that systemd runs.
type bootUnit struct {
	program, stdin string
	env            []string
	ignoresFailure bool
}

// readBootUnit reads the settings of the boot unit that systemd needs to run its command.
func readBootUnit(t *testing.T, path string) bootUnit {
	t.Helper()
	var u bootUnit
	for line := range strings.Lines(string(readFile(t, path))) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "ExecStart":
			u.program, u.ignoresFailure = strings.CutPrefix(value, "-")
		case "Environment":
			u.env = append(u.env, strings.Fields(value)...)
		case "StandardInputText":
			u.stdin += value + "\n"
		}
	}
	if strings.ContainsAny(u.program, " ;|") || u.stdin == "" || len(u.env) != 2 || !u.ignoresFailure {
		t.Fatalf("%s: %+v", path, u)
	}
	return u
}

// run runs the unit's command on the node, as systemd does, and returns its output.
func (u bootUnit) run(t *testing.T, n *node) (output string, code int) {
	t.Helper()
	c := n.Node.Command(n.timeout(t), u.program)
	c.Env = append([]string{"PATH=" + n.path}, u.env...)
	c.Stdin = strings.NewReader(u.stdin)
	text, err := c.CombinedOutput()
	if err != nil && c.ProcessState == nil {
		t.Fatal(err)
	}
	return string(text), c.ProcessState.ExitCode()
}

// installBootUnit lets install write the boot unit, and returns it.
func (n *node) installBootUnit(t *testing.T, args ...string) bootUnit {
	t.Helper()
	units, bin := filepath.Join(n.dir, "units"), filepath.Join(n.dir, "opt")
	must(t, os.MkdirAll(units, 0o755))
	must(t, os.MkdirAll(bin, 0o755))
	all := append([]string{"install", "--plugin", n.plugin(t), "--cni-bin-dir", bin, "--boot-unit", units, "--no-conflist"}, args...)
	n.wantSays(t, 0, []string{"installed and enabled the boot unit"}, all...)
	return readBootUnit(t, filepath.Join(units, install.BootUnitName))
}

// newMachineNode returns a node that is a machine, which can be booted. Only dir and the machine's own directories stay.
func newMachineNode(t *testing.T, f backend) (*node, *machine.Machine) {
	t.Helper()
	world := topology.New(t, topology.Options{})
	dir := t.TempDir()
	n := &node{Topology: world, backend: f, dir: dir, ownDir: filepath.Join(dir, "own"), dataDir: config.DefaultDataDir}
	m := machine.New(t, world.Node)
	n.path = f.programs(t, filepath.Join(dir, "bin"))
	n.cni = topology.NewCNI(t, n.Node, filepath.Join(dir, "net.d"))
	n.cni.Env = []string{"PATH=" + n.path}
	return n, m
}

// machinePod makes a pod on a machine, by cnitool, whose network namespace ends with the boot.
func (n *node) machinePod(t *testing.T, m *machine.Machine) *pod {
	t.Helper()
	n.pods++
	name := fmt.Sprint("pod", n.pods)
	assert.Output(t, m.Command(n.timeout(t), "ip", "netns", "add", name))
	bin := topology.BinDir(t)
	c := m.Command(n.timeout(t), filepath.Join(bin, "cni", "cnitool"), "add", "podnet", "/run/netns/"+name)
	c.Env = append(os.Environ(), "NETCONFPATH="+n.cni.ConfDir, "CNI_PATH="+bin+":"+filepath.Join(bin, "cni"), "PATH="+n.path)
	result := assert.Output(t, c)
	h := n.Adopt(t, name, m.Path("/run/netns/"+name))
	t.Cleanup(func() { must(t, h.Close()) })
	return &pod{Host: h, addrs: addresses(t, result)}
}

// TestBootUnit boots a node: its netfilter is empty, the boot is another one, and the main CNI plugin has written its
// conflist without the plugin entry. The command of the boot unit restores the rules, so the first packet of the first
// pod is right on each backend, and the reconciler that comes then inserts the entry and repairs nothing.
func TestBootUnit(t *testing.T) {
	t.Parallel()
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			n, m := newMachineNode(t, f)
			keys := object{"nonMasqueradeCIDRs": []string{"1.2.3.0/24", "10.0.0.0/8", "fd00::/8"}, "enableIPv6": true}
			var uplinks []string
			for _, link := range assert.Must(m.Netlink.LinkList())(t) {
				uplinks = append(uplinks, link.Attrs().Name)
			}
			n.conflist(t, "podnet", keys)
			n.machinePod(t, m)
			unit := n.installBootUnit(t)

			for boot := range 2 {
				m.Reboot(t, func(link string) bool { return strings.Contains(" "+strings.Join(uplinks, " ")+" ", " "+link+" ") })
				n.writeMainConflist(t)
				if rules := n.rules(t); strings.Contains(rules, policyChain) {
					t.Fatalf("boot %d: there are rules:\n%s", boot, rules)
				}
				if output, code := unit.run(t, n); code != 0 || output != "" {
					t.Fatalf("boot %d: exit code %d\n%s", boot, code, output)
				}
				first := onlyPod(n.machinePod(t, m))
				first.verdicts(t, n, false, map[string]string{"pod": "1.2.3.4 fd00:9::9"})
				first.verdicts(t, n, true, map[string]string{"pod": "1.2.4.1 2001:db8:5::4"})
			}

			said, _, _ := n.reconciler(t, "status")
			wantText(t, "status", said, "Boot unit:", "ran in this boot at "+time.Now().UTC().Format("2006-01-02"))
			n.writeEntryFile(t, string(marshalIndent(t, n.entry(keys))))
			before := n.ruleset(t)
			d := n.startReconciler(t, "--conflist-manage", "--conflist-entry-file", n.entryPath(), "--cni-bin-dir", filepath.Join(n.dir, "opt"),
				"--cni-conf-dir", n.cni.ConfDir)
			d.untilManaged(t, mainFile)
			wantSame(t, "the rules", n.ruleset(t), before)
			if strings.Contains(d.log(), "repaired rules") {
				t.Errorf("the reconciler repaired rules:\n%s", d.log())
			}
		})
	}
}

// policyChain is in the name of each chain of the default masqChain, on each backend.
const policyChain = "IP-MASQ-AGENT"

// TestBootUnitNeverFailsABoot runs the command of the boot unit on nodes that lack something. It ends, says what it could
// not do, and restores what it can.
func TestBootUnitNeverFailsABoot(t *testing.T) {
	t.Parallel()
	elsewhere := func(_ *testing.T, n *node) { n.dataDir = filepath.Join(n.dir, "srv", "masq") }
	documents := func(n *node) string { return filepath.Join(n.dataDir, "sources") }
	for name, c := range map[string]struct {
		before func(t *testing.T, n *node)
		breaks func(t *testing.T, n *node)
		says   []string // nothing else
		lost   bool     // no rules are there afterwards
	}{
		"nothing":             {},
		"a dataDir elsewhere": {before: elsewhere},
		"no documents":        {breaks: func(t *testing.T, n *node) { must(t, os.RemoveAll(n.dataDir)) }, lost: true},
		"a plugin.toml":       {before: func(t *testing.T, n *node) { writeTempFile(t, n.own(config.DefaultPluginFile), n.pluginFile("")) }},
		"an older plugin.toml": {breaks: func(t *testing.T, n *node) {
			writeTempFile(t, n.own(config.DefaultPluginFile), fmt.Sprintf("data_dir = %q\n", n.dataDir))
		}},
		"a plugin.toml that is bad": {breaks: func(t *testing.T, n *node) { writeTempFile(t, n.own(config.DefaultPluginFile), "bogus = 1\n") },
			says: []string{"bogus"}, lost: true},
		"a document that is damaged": {breaks: func(t *testing.T, n *node) {
			for _, path := range assert.Must(filepath.Glob(documents(n) + "/*.json"))(t) {
				must(t, os.WriteFile(path, []byte("{"), 0o600))
			}
		}, says: []string{"read document", "moved aside"}, lost: true},
		"a record that is damaged": {breaks: func(t *testing.T, n *node) {
			must(t, os.WriteFile(filepath.Join(n.dataDir, "record.json"), nil, 0o600)) // as a power cut leaves it
		}, says: []string{"read document", "record.json", "moved aside"}},
		"no program for iptables": {breaks: func(t *testing.T, n *node) {
			if n.backend.variant != "" {
				must(t, os.RemoveAll(n.path))
			}
		}, says: []string{"iptables"}, lost: true},
	} {
		for _, f := range backends()[:2] {
			t.Run(name+"/"+f.name, func(t *testing.T) {
				t.Parallel()
				n := newNode(t, f)
				if c.before != nil {
					c.before(t, n)
				}
				n.conflist(t, "podnet", object{"nonMasqueradeCIDRs": []string{"1.2.3.0/24"}})
				n.pod(t, "podnet")
				unit := n.installBootUnit(t, "--data-dir", n.dataDir)
				n.tool(t, "nft", "flush", "ruleset")
				n.endBoot(t)
				if c.breaks != nil {
					c.breaks(t, n)
				}
				n.writeMainConflist(t)
				output, code := unit.run(t, n)
				says, lost := c.says, c.lost
				if name == "no program for iptables" && f.variant == "" {
					says, lost = nil, false
				}
				if len(says) == 0 && (code != 0 || output != "") {
					t.Errorf("exit code %d\n%s", code, output)
				}
				wantText(t, "the log", output, says...)
				if has := strings.Contains(n.rules(t), policyChain); has == lost {
					t.Errorf("there are rules: %v, exit code %d\n%s", has, code, output)
				}
			})
		}
	}
}
