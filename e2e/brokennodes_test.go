// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unicode"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// brokenNode is a fault of a node, and what an operator sees of it.
type brokenNode struct {
	name string
	// flags of the reconciler, beside those of the DaemonSet.
	flags   []string
	backend int
	// breaks breaks a healthy node. The function that it returns does what the remedy says; without one, the
	// remedy needs what the test does not have.
	breaks func(t *testing.T, n *faultyNode) (repair func())
	// reason is the only one for which the node is not ready; "" for a node that is ready and has a problem.
	reason        string
	cause, remedy []string // texts
	code          int      // exit code of status
	series        string   // a line of /metrics that shows the fault, where no reason does
	warning       bool     // status shows it among its rows, and neither as a reason nor as a problem
	noMetrics     bool     // no reconciler serves them
	differs       bool     // the entry from that of entry_file, which is a problem
}

func brokenNodes() []brokenNode {
	agentFile := func(text string) func(*testing.T, *faultyNode) func() {
		return func(t *testing.T, n *faultyNode) func() {
			n.agentFile(t, "ip-masq-agent", text)
			return func() { n.agentFile(t, "ip-masq-agent", faultyNodeFile) }
		}
	}
	return []brokenNode{
		{name: "healthy"},
		{name: "rules-flushed", reason: "flapping", code: 3,
			breaks: func(t *testing.T, n *faultyNode) func() { return n.loop(t, "nft delete table ip ip-masq") },
			cause:  []string{"another program reverts the rules repeatedly", `most likely "nft"`},
			remedy: []string{"stop that program"}},
		{name: "third-party-masquerade", series: "ip_masq_foreign_rules 1",
			breaks: func(t *testing.T, n *faultyNode) func() {
				return thirdPartyRules{variant: "nft", lines: "-A POSTROUTING -s 10.1.0.0/16 -j MASQUERADE"}.load(t, n.node)
			},
			cause:  []string{"foreign-masquerade", "-s 10.1.0.0/16 -j MASQUERADE"},
			remedy: []string{"Switch masquerading off in the program that writes the rules. If you only remove them, it may write them again"}},
		{name: "bad-configmap", reason: "source", code: 3,
			breaks: agentFile("nonMasqueradeCIDRs: [20.0.0.1/8]\n"),
			cause:  []string{"/agent/ip-masq-agent:1: nonMasqueradeCIDRs[0]: 20.0.0.1/8", "its last good policy stays in force"},
			remedy: []string{"did you mean 20.0.0.0/8?"}},
		{name: "unknown-configmap-key", series: `ip_masq_source_warnings{source="agent-files"} 1`,
			breaks: agentFile(faultyNodeFile + "nonMasqueradeCIDR: [20.0.0.0/8]\n"),
			cause:  []string{"unknown-key", "/agent/ip-masq-agent:2: nonMasqueradeCIDR: is not a known key and is ignored"},
			remedy: []string{"did you mean nonMasqueradeCIDRs?", "Correct the names of the keys"}},
		{name: "conflict", reason: "conflict", code: 3,
			breaks: func(t *testing.T, n *faultyNode) func() {
				n.conflist(t, "zlatenet", object{"randomFully": false})
				return func() { n.conflist(t, "zlatenet", object{"randomFully": true}) }
			},
			cause:  []string{`randomFully of network "zlatenet" is false, which conflicts with randomFully of network "podnet", true`},
			remedy: []string{"make them agree"}},
		{name: "full-disk", reason: "state", code: 3,
			breaks: func(t *testing.T, n *faultyNode) func() {
				disk := filepath.Dir(n.dataDir)
				fillDisk(t, disk, 0)
				n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs: [10.0.0.0/8, 20.0.0.0/8]\n")
				return func() { must(t, os.Remove(filepath.Join(disk, "ballast"))) }
			},
			cause:  []string{"no space left on device"},
			remedy: []string{"free space"}},
		{name: "read-only-data-dir", reason: "state", code: 3,
			breaks: func(t *testing.T, n *faultyNode) func() {
				return n.readOnly(t, n.dataDir)
			},
			cause:  []string{"read-only file system"},
			remedy: []string{"writable"}},
		{name: "damaged-document", reason: "state", code: 3,
			breaks: func(t *testing.T, n *faultyNode) func() {
				n.addAndCheck(t, n.conf(t, "othernet", object{"masqChain": "OTHER", "sourceCIDRs": []string{"10.2.0.0/16"}}))
				n.d.until(t, "chain of the other network", func() bool { return strings.Contains(n.d.scrape(t), `chain="OTHER"`) })
				document := n.document(t, "othernet")
				must(t, os.WriteFile(document, []byte("{"), 0o600))
				return func() { must(t, os.Remove(document)) }
			},
			cause:  []string{".json", "no conflist or agent file says what it held"},
			remedy: []string{"until the next ADD of its network writes it again, or the document is removed"}},
		{name: "backend-typo", reason: "source", code: 3,
			breaks: func(t *testing.T, n *faultyNode) func() {
				n.nodeSettings(t, "backend = \"nftabels\"\n")
				return func() { n.nodeSettings(t, "") }
			},
			cause:  []string{"/etc/ip-masq/reconciler.toml:5", "backend", "nftabels is not one of the choices"},
			remedy: []string{"write auto, iptables or nftables"}},
		{name: "conflicting-flag", reason: "source", code: 3,
			breaks: func(t *testing.T, n *faultyNode) func() {
				n.agentFile(t, "ip-masq-agent", faultyNodeFile+"randomFully: true\n")
				n.d.until(t, "the agent file in force", func() bool { return strings.Contains(n.d.log(), "changed=randomFully\n") })
				n.restart(t, "--random-fully=false")
				return func() { n.restart(t) }
			},
			cause:  []string{"/agent/ip-masq-agent:2: randomFully: true conflicts with false in [agent] of the reconciler's settings"},
			remedy: []string{"write the same in both, or leave it out of one"}},
		{name: "iptables-missing", reason: "backend", code: 3, backend: 1,
			breaks: func(t *testing.T, n *faultyNode) func() {
				must(t, os.Rename(n.path, n.path+".away"))
				return func() { must(t, os.Rename(n.path+".away", n.path)) }
			},
			cause:  []string{"iptables", "the rules are correct, but a repair would fail"},
			remedy: []string{"install iptables"}},
		{name: "forwarding-off",
			breaks: func(t *testing.T, n *faultyNode) func() {
				must(t, n.Node.Sysctl("net/ipv4/ip_forward", "0"))
				return func() { must(t, n.Node.Sysctl("net/ipv4/ip_forward", "1")) }
			},
			cause:  []string{"forwarding-off", "net.ipv4.ip_forward is 0"},
			remedy: []string{"Set the sysctl to 1"}},
		{name: "main-plugin-ipmasq", backend: 1, series: "ip_masq_foreign_rules 1",
			breaks: func(t *testing.T, n *faultyNode) func() {
				bridge := n.bridge("podnet")
				bridge["ipMasq"] = true
				n.write(t, "podnet", bridge, n.entry(faultyNodeKeys()))
				pod := n.pod(t, "podnet")
				return func() {
					n.del(t, "podnet", pod)
					n.conflist(t, "podnet", faultyNodeKeys())
				}
			},
			cause:  []string{"main-plugin-ipmasq", `plugins[0] ("bridge") has "ipMasq": true`},
			remedy: []string{`Set "ipMasq": false there`}},
		{name: "entry-lost", series: "ip_masq_conflist_present 0", flags: []string{"--conflist-manage=false"},
			breaks: func(t *testing.T, n *faultyNode) func() {
				n.write(t, "podnet", n.bridge("podnet"))
				return func() { n.install(t) }
			},
			cause:  []string{"The network that the runtime uses has no plugin entry", "10-podnet.conflist"},
			remedy: []string{"run ip-masq-reconciler install, which inserts the entry"}},
		{name: "entry-first", reason: "conflist", code: 3,
			breaks: func(t *testing.T, n *faultyNode) func() {
				n.write(t, "podnet", n.entry(faultyNodeKeys()), n.bridge("podnet"))
				return func() { n.conflist(t, "podnet", faultyNodeKeys()) }
			},
			cause:  []string{`10-podnet.conflist: plugins[0]: the plugin entry of network "podnet" stands where every ADD fails, first`},
			remedy: []string{"move it behind the plugin that makes the interface"}},
		{name: "plugin-missing", reason: "plugin", code: 3,
			breaks: func(t *testing.T, n *faultyNode) func() {
				must(t, os.Remove(filepath.Join(n.pluginDir(), "ip-masq")))
				return func() { n.install(t) }
			},
			cause:  []string{"/plugins/ip-masq is missing", "no pod can start"},
			remedy: []string{`run "ip-masq-reconciler install", or in Kubernetes delete this node's pod`}},
		{name: "two-reconcilers", reason: "standby", warning: true,
			breaks: func(t *testing.T, n *faultyNode) func() {
				n.d = n.startReconciler(t, n.flags...)
				return func() { n.d.stop(t) }
			}},
		{name: "stopped-reconciler", code: 1, noMetrics: true,
			breaks: func(t *testing.T, n *faultyNode) func() {
				n.d.kill(t)
				return func() { n.restart(t) }
			},
			cause:  []string{"no reconciler runs", "last seen", "reconciler-not-running"},
			remedy: []string{"Start the service (systemctl start ip-masq-reconciler), or find out why the pod of its DaemonSet does not run"}},
		{name: "hanging-reconciler", code: 3, noMetrics: true,
			breaks: func(t *testing.T, n *faultyNode) func() {
				n.d.signal(t, syscall.SIGSTOP)
				t.Cleanup(func() { n.d.signal(t, syscall.SIGCONT) })
				return func() { n.d.signal(t, syscall.SIGCONT) }
			},
			cause:  []string{"the reconciler does not answer", "no answer in 2s"},
			remedy: []string{"kill -CONT"}},
		{name: "foreign-data-dir-owner", reason: "state", code: 1, // status does not look into the directory
			breaks: func(t *testing.T, n *faultyNode) func() {
				uid := otherUser(t)
				must(t, os.Chown(n.dataDir, uid, uid))
				return func() { must(t, os.Chown(n.dataDir, os.Getuid(), os.Getgid())) }
			},
			cause:  []string{"it belongs to user 65534, and this process runs as user 0"},
			remedy: []string{"chown"}},
		{name: "newer-schema", reason: "state", code: 3,
			breaks: func(t *testing.T, n *faultyNode) func() {
				document := n.document(t, "podnet")
				was := readFile(t, document)
				text, _ := newerDocument()
				must(t, os.WriteFile(document, []byte(text), 0o600))
				return func() { must(t, os.WriteFile(document, was, 0o600)) }
			},
			cause:  []string{"a newer version"},
			remedy: []string{"install the newer version again"}},
		{name: "third-party-chain", reason: "rules", code: 3, backend: 1,
			breaks: func(t *testing.T, n *faultyNode) func() {
				n.tool(t, "iptables", "-t", "nat", "-N", "THEIRS")
				n.tool(t, "iptables", "-t", "nat", "-A", "THEIRS", "-j", "ACCEPT")
				keys := object{"masqChain": "THEIRS", "sourceCIDRs": []string{"10.2.0.0/16"}, "nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}
				n.conflist(t, "zlatenet", keys)
				return func() {
					keys["masqChain"] = "MINE"
					n.conflist(t, "zlatenet", keys)
				}
			},
			cause:  []string{`network "zlatenet"`, "chain THEIRS (ipv4)", "belongs to another program"},
			remedy: []string{"delete it, or choose another masqChain"}},
		{name: "bad-ports", reason: "source", code: 3,
			breaks: agentFile("toPorts: \"2000-1000\"\n"),
			cause:  []string{"/agent/ip-masq-agent:1: toPorts: 2000-1000 ends before it begins"},
			remedy: []string{"did you mean 1000-2000?"}},
		{name: "other-data-dir", reason: "conflist", code: 3, differs: true,
			breaks: func(t *testing.T, n *faultyNode) func() {
				keys := faultyNodeKeys()
				keys["dataDir"] = filepath.Join(n.dir, "elsewhere")
				n.conflist(t, "podnet", keys)
				return func() { n.conflist(t, "podnet", faultyNodeKeys()) }
			},
			cause:  []string{"10-podnet.conflist: plugins[1]: dataDir:", "/elsewhere", "is not the reconciler's data_dir"},
			remedy: []string{"a node has one dataDir: state the same in both"}},
	}
}

// faultyNode is a node with a network, agent files, a file system for its dataDir, and a reconciler with the
// flags of the DaemonSet.
type faultyNode struct {
	*node
	d     *daemon
	flags []string
}

// faultyNodeFile is its agent file.
const faultyNodeFile = "nonMasqueradeCIDRs: [10.0.0.0/8]\n"

// faultyNodeKeys are those of its plugin entry.
func faultyNodeKeys() object { return object{"randomFully": true} }

func newFaultyNode(t *testing.T, f backend, flags ...string) *faultyNode {
	t.Helper()
	n := &faultyNode{node: newNode(t, f)}
	n.listeners = -181 // the first address is the default of health_listen, 127.0.0.1:19820
	disk := filepath.Join(n.dir, "disk")
	n.dataDir = filepath.Join(disk, "data")
	must(t, os.Mkdir(disk, 0o700))
	must(t, syscall.Mount("disk", disk, "tmpfs", 0, "size=128k,mode=0700"))
	t.Cleanup(func() { must(t, syscall.Unmount(disk, syscall.MNT_DETACH)) })
	n.nodeSettings(t, "")
	n.conflist(t, "podnet", faultyNodeKeys())
	n.agentFile(t, "ip-masq-agent", faultyNodeFile)
	n.flags = append(n.manageArgs(t, faultyNodeKeys()), flags...)
	n.d = n.startReconciler(t, n.flags...).untilReady(t)
	return n
}

// fillDisk leaves free bytes in a file system.
func fillDisk(t *testing.T, disk string, free int64) {
	t.Helper()
	file := assert.Must(os.Create(filepath.Join(disk, "ballast")))(t)
	var st syscall.Statfs_t
	must(t, syscall.Fstatfs(int(file.Fd()), &st))
	_, err := file.Write(bytes.Repeat([]byte{1}, max(0, int(st.Bfree)*int(st.Bsize)-int(free))))
	must(t, errors.Join(err, file.Close()))
}

// nodeSettings writes /etc/ip-masq/reconciler.toml of the node: its directories, then other lines.
func (n *faultyNode) nodeSettings(t *testing.T, lines string) {
	t.Helper()
	path := n.own("/etc/ip-masq/reconciler.toml")
	text := fmt.Sprintf("data_dir = %q\ncni_conf_dir = %q\ncni_bin_dir = %q\nagent_config_dir = %q\n%s",
		n.dataDir, n.cni.ConfDir, n.pluginDir(), n.agentDir(), lines)
	must(t, errors.Join(os.WriteFile(path+".next", []byte(text), 0o644), os.Rename(path+".next", path)))
}

// restart starts another reconciler in place of the running one.
func (n *faultyNode) restart(t *testing.T, flags ...string) {
	t.Helper()
	n.d.stop(t)
	n.d = n.startReconciler(t, slices.Concat(n.flags, flags)...)
}

// install runs the command install with the flags of the DaemonSet's init container.
func (n *faultyNode) install(t *testing.T) {
	t.Helper()
	must(t, os.RemoveAll(filepath.Join(n.pluginDir(), "ip-masq"))) // a symlink
	n.wantSays(t, 0, nil, "install", "--plugin", n.plugin(t), "--conflist-entry-file", n.entryPath(), "--cni-bin-dir", n.pluginDir())
}

// unwrapped returns a text without white space, as status wraps lines anywhere.
func unwrapped(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) {
			return -1
		}
		return r
	}, text)
}

// lacking returns which of the texts are not in another one, however that one is wrapped.
func lacking(text string, texts []string) []string {
	text = unwrapped(text)
	return slices.DeleteFunc(slices.Clone(texts), func(s string) bool { return strings.Contains(text, unwrapped(s)) })
}

// soon waits until a function returns "". After timelimit.Wait it fails the test with what the function returned last.
func soon(t *testing.T, wrong func() string) {
	t.Helper()
	var what string
	if !timelimit.Await(timelimit.Wait, func() bool { what = wrong(); return what == "" }) {
		t.Fatal(what)
	}
}

// wantStatus waits until status has an exit code and shows texts. It returns the reasons
// that status gives.
func (n *faultyNode) wantStatus(t *testing.T, code int, texts ...string) (reasons []string) {
	t.Helper()
	var output string
	soon(t, func() string {
		stdout, stderr, have := n.byHand(t, "status")
		output = stdout + stderr
		if missing := lacking(output, texts); have != code || len(missing) > 0 {
			return fmt.Sprintf("status has exit code %d, want %d, and lacks %q:\n%s", have, code, missing, output)
		}
		return ""
	})
	for _, found := range regexp.MustCompile(`(?m)^  ([\w-]+): `).FindAllStringSubmatch(output, -1) {
		reasons = append(reasons, found[1])
	}
	return reasons
}

// TestBrokenNodes breaks a node in each way that operators meet. It checks that status shows the cause and the
// remedy, that the reason is the same in status, /readyz, the log and the metric not_ready, and that the
// remedy helps. deploy/testdata/metrics has the metrics of each node, over which the alerts are evaluated.
func TestBrokenNodes(t *testing.T) {
	t.Parallel()
	for _, c := range brokenNodes() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newFaultyNode(t, backends()[c.backend], c.flags...)
			if reasons := n.wantStatus(t, 0); len(reasons) > 0 { // doctor's findings are reason "problem"
				t.Errorf("status of a healthy node gives reasons %q", reasons)
			}
			if c.breaks == nil {
				compareMetrics(t, c, n.wantReason(t, c))
				return
			}
			repair := c.breaks(t, n)
			says := append(slices.Clone(c.cause), c.remedy...)
			if !c.noMetrics {
				n.d.signal(t, syscall.SIGHUP) // the interval is long, and not everything is an event
				compareMetrics(t, c, n.wantReason(t, c))
			}
			want := []string{"problem"}
			switch {
			case c.differs, c.code == 1 && c.reason != "":
				want = []string{c.reason, "problem"}
			case c.reason != "":
				want = []string{c.reason}
			}
			if c.warning {
				want = nil
			}
			reasons := n.wantStatus(t, c.code, says...)
			if c.reason == "flapping" { // status finds the rules as they are at the moment
				reasons = slices.DeleteFunc(reasons, func(r string) bool { return r == "rules" })
			}
			assert.Equal(t, "reasons of status", slices.Compact(reasons), want)
			if c.reason != "flapping" {
				soon(t, func() string { return n.sameFindings(t) })
			}
			if stdout, _, _ := n.byHand(t, "check"); c.reason == "state" && strings.Contains(stdout, "once applies it") {
				t.Errorf("check recommends what cannot succeed:\n%s", stdout)
			}
			if repair == nil {
				return
			}
			repair()
			if c.name != "two-reconcilers" {
				n.d.signal(t, syscall.SIGHUP)
			}
			soon(t, func() string {
				stdout, stderr, code := n.byHand(t, "status")
				if code != 0 || len(c.cause) > 0 && len(lacking(stdout, c.cause)) == 0 {
					return fmt.Sprintf("status after the remedy has exit code %d:\n%s%s", code, stdout, stderr)
				}
				return ""
			})
		})
	}
}

// TestFullDiskIsSeenAtOnce: nothing tells the reconciler that the disk is full, until its interval ends. Commands look.
func TestFullDiskIsSeenAtOnce(t *testing.T) {
	t.Parallel()
	n := newFaultyNode(t, backends()[0])
	n.wantStatus(t, 0)
	fillDisk(t, filepath.Dir(n.dataDir), 0)
	for command, want := range map[string]int{"status": 3, "check": 1} {
		stdout, stderr, code := n.byHand(t, command)
		if missing := lacking(stdout+stderr, []string{"state: ", "no space left on device; free space or inodes"}); code != want || len(missing) > 0 {
			t.Errorf("%s: exit code %d, want %d, and lacks %q:\n%s%s", command, code, want, missing, stdout, stderr)
		}
	}
	if difference := n.sameFindings(t); difference != "" {
		t.Error(difference)
	}
}

// wantReason waits until the reason of a fault is the only one in the metric not_ready and in /readyz, and in the
// log. It returns what /metrics served then.
func (n *faultyNode) wantReason(t *testing.T, c brokenNode) (metrics string) {
	t.Helper()
	var want []string
	if c.reason != "" {
		want = []string{fmt.Sprintf("ip_masq_not_ready{reason=%q} 1\n", c.reason)}
	}
	cause := c.cause
	if c.reason == "standby" { // status is that of the active one
		cause = []string{"another ip-masq-reconciler runs on this node"}
	}
	soon(t, func() string {
		code, body := n.d.ready()
		var err error
		_, metrics, err = n.d.get(n.d.metricsAddress, "/metrics") // fails while the settings change
		var reasons []string
		for line := range strings.Lines(metrics) {
			if strings.HasPrefix(line, "ip_masq_not_ready{") && strings.HasSuffix(line, " 1\n") {
				reasons = append(reasons, line)
			}
		}
		switch {
		case err != nil || !slices.Equal(reasons, want):
			return fmt.Sprintf("/metrics (%v) has reasons %q, want %q; /readyz:\n%s\nthe log:\n%s", err, reasons, want, body, abbreviate(n.d.log()))
		case c.reason == "" && code != http.StatusOK:
			return "not ready: " + body
		case !strings.Contains(metrics, "\n"+c.series):
			return fmt.Sprintf("/metrics lacks %q:\n%s", c.series, metrics)
		case c.reason == "":
		case !strings.HasPrefix(body, c.reason+": ") || strings.Contains(body, "\n"+c.reason) || len(lacking(body, cause)) > 0:
			return fmt.Sprintf("/readyz lacks %q:\n%s", lacking(body, cause), body)
		case !strings.Contains(n.d.log(), "reason="+c.reason):
			return "the log has no such reason:\n" + abbreviate(n.d.log())
		}
		return ""
	})
	return metrics
}

// compareMetrics compares the metrics that alerts are about with the golden file of the fault. Numbers that
// differ between runs and machines are replaced.
func compareMetrics(t *testing.T, c brokenNode, metrics string) {
	t.Helper()
	rules := readFile(t, "../deploy/kustomize/components/monitoring/rules.yaml")
	names := regexp.MustCompile(`\bip_masq_\w+`).FindAllString(string(rules), -1)
	var kept strings.Builder
	for line := range strings.Lines(metrics) {
		name := regexp.MustCompile(`^\w*`).FindString(line)
		if !slices.Contains(names, name) || strings.HasPrefix(name, "ip_masq_conntrack_") { // of the machine
			continue
		}
		series, value, _ := strings.Cut(line, " ")
		series = regexp.MustCompile(`version="[^"]*"`).ReplaceAllString(series, `version="v0"`)
		if strings.HasSuffix(name, "_total") && value != "0\n" {
			value = "100\n"
		}
		kept.WriteString(series + " " + value)
	}
	golden.Check(t, filepath.Join("../deploy/testdata/metrics", c.name+".prom"), kept.String())
}
