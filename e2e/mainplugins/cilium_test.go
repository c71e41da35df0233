// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package mainplugins

import (
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/machine"
)

const (
	ciliumFile = "05-cilium.conflist"
	ebpf       = "ebpf-masquerade" // doctor names Cilium's data plane
)

// cilium runs Cilium's own writer of conflists (tools/cilium) on a node.
type cilium struct {
	*node
	daemon   *machine.Daemon
	conflist string // as the first start wrote it
}

func newCilium(t *testing.T) *cilium {
	t.Helper()
	return &cilium{node: newNode(t, "1.0.0", "cilium-cni")}
}

// restart stops the writer and starts it with these flags.
func (c *cilium) restart(t *testing.T, flags ...string) {
	t.Helper()
	dir := os.Getenv("IPMASQ_CILIUM_DIR")
	if dir == "" {
		t.Fatal("IPMASQ_CILIUM_DIR is not set: make e2e-cluster builds the program")
	}
	if c.daemon != nil {
		must(t, c.daemon.Stop(10*time.Second))
	}
	before, now := c.writes(), c.read()
	flags = append([]string{"--write-cni-conf-when-ready=" + filepath.Join(confDir, ciliumFile)}, flags...)
	c.daemon = assert.Must(c.StartDaemon("cilium", nil, filepath.Join(dir, "cniconf"), flags...))(t)
	if c.conflist == "" || now != c.conflist { // it writes if the text differs
		until(t, 10*time.Second, c.daemon.Output, func() bool { return c.writes() > before })
	}
	if c.conflist == "" {
		c.conflist = c.read()
	}
}

// read returns the conflist, "" if there is none.
func (c *cilium) read() string {
	text, _ := os.ReadFile(c.Path(filepath.Join(confDir, ciliumFile)))
	return string(text)
}

// writes returns how often Cilium has written its conflist.
func (c *cilium) writes() int {
	if c.daemon == nil {
		return 0
	}
	return strings.Count(c.daemon.Output(), "Wrote CNI configuration file")
}

// TestCilium runs beside Cilium with cni-exclusive=false, where it writes its conflist at its start
// only.
func TestCilium(t *testing.T) {
	t.Parallel()
	c := newCilium(t)
	c.beside(t, ciliumFile, func() { c.restart(t, "--cni-exclusive=false") }, ebpf)
}

// TestCiliumExclusive runs beside Cilium with cni-exclusive=true, where it writes its conflist
// whenever anything changes in the directory, and renames all other conflists. It checks what the
// reconciler reports, how often it inserts the entry, which policy pods get meanwhile, and the remedy.
func TestCiliumExclusive(t *testing.T) {
	t.Parallel()
	c := newCilium(t)
	c.restart(t, "--cni-exclusive=true")
	c.pod(t, "before", false)
	start := time.Now()
	c.run(t)
	c.untilUnready(t, 20*time.Second, "conflist: ", ciliumFile, "removed repeatedly", "cni.exclusive=false")
	t.Logf("reported after %s", time.Since(start).Round(time.Millisecond))
	const most, watched = 10, 3 * time.Second // times a second
	repairs := func() int { return assert.Must(strconv.Atoi(c.metric(t, "conflist_repairs_total")))(t) }
	before, began := repairs(), time.Now()
	time.Sleep(watched)
	if more := float64(repairs() - before); more == 0 || more > 1+most*time.Since(began).Seconds() {
		t.Errorf("the entry was inserted %g times in %s, beside %d writes of Cilium", more, time.Since(began), c.writes())
	}
	until(t, 20*time.Second, c.read, func() bool { return c.entries(ciliumFile) == 1 })
	if log := c.reconciler.Output(); strings.Count(log, "level=ERROR") != 1 || strings.Count(log, "\n") > 8 {
		t.Errorf("the reconciler logged:\n%s", log)
	}
	// Pods start. The policy of the entry is in force only if the reconciler or an ADD has seen it.
	p := assert.Must(c.runPod(t, "entry"))(t)
	seen, err := p.host.SendUDP(netip.MustParseAddrPort("203.0.113.11:7"))
	t.Logf("a pod with %s was seen as %s: %v", p.Addrs, seen.Source, err)
	must(t, c.reconciler.Stop(10*time.Second))

	// The policy of agent files is in force.
	must(t, c.WriteFile("/etc/ip-masq/agent/ip-masq-agent", strings.Replace(entry, `"type": "ip-masq", `, "", 1), 0o644))
	c.run(t, "--agent-config-dir=/etc/ip-masq/agent", "--enable-ipv6")
	c.untilUnready(t, 20*time.Second, "removed repeatedly")
	c.pod(t, "files", true)
	c.packets(t, true)

	c.restart(t, "--cni-exclusive=false")
	until(t, time.Minute, func() string { return "the entry" }, func() bool { return c.entries(ciliumFile) == 1 })
	until(t, time.Minute, func() string { return "readiness" }, func() bool { code, _ := c.get(t, health+"/readyz"); return code == 200 })
	c.untilHealthy(t, ebpf)
	c.pod(t, "after", true)
	c.endPods(t)
}

// TestCiliumRenames installs Cilium with cni-exclusive=true beside the main CNI plugin whose network
// has the plugin entry. It checks that the reconciler says what to do.
func TestCiliumRenames(t *testing.T) {
	t.Parallel()
	c := newCilium(t)
	w := Writers()[0]
	must(t, w.Start(c.Path(confDir)))
	c.run(t, "--conflist-network=kindnet")
	c.untilEntry(t, w.File)
	c.untilReady(t)
	c.restart(t, "--cni-exclusive=true")
	c.untilUnready(t, 5*time.Second, "waiting for the main CNI plugin's network: find the network kindnet", "Cilium renames", "cni.exclusive=false")
	c.restart(t, "--cni-exclusive=false")
	must(t, w.Start(c.Path(confDir)))
	c.untilEntry(t, w.File)
	c.untilReady(t)
}

// TestCiliumReadsConflist runs beside Cilium with cni-exclusive=true and a conflist of the
// administrator's that has the plugin entry, which Cilium copies.
func TestCiliumReadsConflist(t *testing.T) {
	t.Parallel()
	c := newCilium(t)
	const file = "/etc/cni/cilium/custom.conflist"
	without := `{"cniVersion": "1.0.0", "name": "cilium", "plugins": [{"type": "cilium-cni"}]}`
	must(t, c.WriteFile(file, strings.Replace(without, `}]`, `}, `+entry+`]`, 1), 0o644))
	c.restart(t, "--cni-exclusive=true", "--read-cni-conf="+file)
	c.run(t)
	c.untilReady(t)
	c.untilHealthy(t, ebpf)
	c.pod(t, "one", true)
	if repairs := c.metric(t, "conflist_repairs_total"); repairs != "0" || c.entries(ciliumFile) != 1 {
		t.Errorf("%s repairs, %d entries", repairs, c.entries(ciliumFile))
	}
	must(t, c.reconciler.Stop(10*time.Second))
	c.wantUninstall(t, nil, 1, "it is named in "+confDir+"/"+ciliumFile)
	must(t, c.WriteFile(file, without, 0o644))
	c.restart(t, "--cni-exclusive=true", "--read-cni-conf="+file)
	until(t, 5*time.Second, c.daemon.Output, func() bool { return c.read() == without })
	c.wantUninstall(t, nil, 0)
	c.wantGone(t, ciliumFile, without)
	c.packets(t, false)
	c.endPods(t)
}
