// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// The comparison accounts for these intended differences:
//
//   - ip-masq-agent-v2 never masquerades with --random-fully; ip-masq does by default, as
//     ip-masq-agent.
//   - ip-masq-agent-v2 writes the prefixes of several files in the random order of a Go map;
//     ip-masq writes them file by file. The order has no effect, since all these rules return.
//   - ip-masq-agent writes duplicate prefixes; ip-masq writes each prefix once.
//   - ip-masq-agent reads only the file ip-masq-agent; ip-masq reads every file whose name begins
//     with ip-masq, in both dialects.
//   - ip-masq-agent-v2 exits if its directory does not exist; ip-masq applies the defaults.
//   - ip-masq refuses a null in a list of prefixes. For ip-masq-agent [null] is the first default
//     prefix, because encoding/json decodes into the list of defaults.
//
// The field destinations follows the agents' documentation.

// agentCase is a configuration of an agent: the files in its directory and its flags.
type agentCase struct {
	name  string
	flags []string
	files map[string]string // nil: the directory does not exist

	// destinations are those that the agent's documentation calls exempt.
	destinations string
	// extraFlags are flags that the agent does not have.
	extraFlags []string
}

// singleFile returns a directory that holds only the file ip-masq-agent.
func singleFile(text string) map[string]string { return map[string]string{"ip-masq-agent": text} }

// noFiles returns an empty directory, as kubelet mounts an optional ConfigMap that does not exist.
func noFiles() map[string]string { return map[string]string{} }

// The default and the reserved ranges of the agents' documentation.
const (
	linkLocal     = "169.254.0.0/16"
	defaultRanges = "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16"
	allReserved   = defaultRanges + " 100.64.0.0/10 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4"
)

// agentV1Cases returns the configurations of ip-masq-agent.
func agentV1Cases() []agentCase {
	const usual = linkLocal + " " + defaultRanges
	cases := []agentCase{
		{name: "defaults", files: noFiles(), destinations: usual},
		{name: "no directory", destinations: usual},
		{name: "reserved ranges", flags: []string{"--nomasq-all-reserved-ranges"}, files: noFiles(), destinations: linkLocal + " " + allReserved},
		{name: "reserved ranges and a file without a list", flags: []string{"-nomasq-all-reserved-ranges=true"},
			files: singleFile("resyncInterval: 5m\n"), destinations: linkLocal + " " + allReserved},
		{name: "list replaces the reserved ranges", flags: []string{"--nomasq-all-reserved-ranges"},
			files: singleFile("nonMasqueradeCIDRs: [192.168.0.0/16]\n"), destinations: linkLocal + " 192.168.0.0/16"},
		{name: "only link-local", files: singleFile("masqLinkLocal: true\n"), destinations: defaultRanges},
		{name: "explicit empty list", files: singleFile("nonMasqueradeCIDRs: []\n"), destinations: linkLocal},
		{name: "no exemptions", files: singleFile("nonMasqueradeCIDRs: []\nmasqLinkLocal: true\n"), destinations: ""},
		{name: "null for a list", files: singleFile("nonMasqueradeCIDRs:\n"), destinations: linkLocal},
		{name: "written order", destinations: "172.16.0.0/12 10.0.0.0/8",
			files: singleFile("nonMasqueradeCIDRs:\n  - 172.16.0.0/12\n  - 10.0.0.0/8\ncidrLimit: 64\nmasqLinkLocal: true\nresyncInterval: 5s\n")},
		{name: "nested prefixes", destinations: linkLocal + " 10.0.0.0/8 10.1.0.0/16 8.8.8.8/32 10.1.2.0/24",
			files: singleFile("nonMasqueradeCIDRs: [10.0.0.0/8, 10.1.0.0/16, 8.8.8.8/32, 10.1.2.0/24]\n")},
		{name: "all destinations", files: singleFile("nonMasqueradeCIDRs: [0.0.0.0/0]\n"), destinations: linkLocal + " 0.0.0.0/0"},
		{name: "JSON", destinations: "172.16.0.0/12 10.0.0.0/8",
			files: singleFile(`{"nonMasqueradeCIDRs": ["172.16.0.0/12", "10.0.0.0/8"], "masqLinkLocal": true, "resyncInterval": "\u0035\u006d"}`)},
		{name: "keys in another letter case", files: singleFile("NONMASQUERADECIDRS: [100.64.0.0/10]\nmasqlinklocal: true\n"), destinations: "100.64.0.0/10"},
		{name: "unknown keys", files: singleFile("nonMasqueradeCIDRs: [100.64.0.0/10]\nnonMasqueradeCidr: 10.0.0.0/8\nmtu: 1500\n"),
			destinations: linkLocal + " 100.64.0.0/10"},
		{name: "empty file", files: singleFile(""), destinations: usual},
		{name: "only a comment", files: singleFile("# nonMasqueradeCIDRs: []\n"), destinations: usual},
		{name: "file with another name", files: map[string]string{"config": "nonMasqueradeCIDRs: []\n"}, destinations: usual},
		{name: "300 prefixes", files: singleFile("cidrLimit: 300\nnonMasqueradeCIDRs: [" + strings.Join(manyPrefixes(300), ", ") + "]\n"),
			destinations: linkLocal + " " + strings.Join(manyPrefixes(300), " ")},
		{name: "IPv6 on", flags: []string{"--enable-ipv6"}, files: noFiles(), destinations: usual + " fe80::/10"},
		{name: "IPv6 prefixes", flags: []string{"-enable-ipv6"}, files: singleFile("nonMasqueradeCIDRs: [10.244.0.0/16, 'fc00::/7', 172.16.0.0/12, '2001:db8::/32']\n"),
			destinations: linkLocal + " 10.244.0.0/16 172.16.0.0/12 fe80::/10 fc00::/7 2001:db8::/32"},
		{name: "only link-local of IPv6", flags: []string{"--enable-ipv6=true"}, files: singleFile("masqLinkLocalIPv6: true\n"), destinations: usual},
		{name: "all IPv6 destinations", flags: []string{"--enable-ipv6"}, files: singleFile("masqLinkLocalIPv6: true\nnonMasqueradeCIDRs: ['::/0']\n"),
			destinations: linkLocal + " ::/0"},
		{name: "random-fully off", flags: []string{"--random-fully=false"}, files: noFiles(), destinations: usual},
		{name: "other chain", flags: []string{"-masq-chain", "MASQUERADE-HERE"}, files: noFiles(), destinations: usual},
	}
	for _, ports := range []string{
		"1024-29999", "1024-29999,32768-65535", "1024-29999,32768-49151,61000-65535",
		"1024,65535", "2000", "61000-65535,1024-29999,40000", "1-65535",
	} {
		for _, random := range []string{"true", "false"} {
			cases = append(cases, agentCase{name: "to-ports " + ports + " random-fully " + random, files: noFiles(),
				flags: []string{"--to-ports", ports, "--enable-ipv6", "--random-fully=" + random}, destinations: usual + " fe80::/10"})
		}
	}
	return cases
}

// agentV2Cases returns the configurations of ip-masq-agent-v2.
func agentV2Cases() []agentCase {
	const usual = linkLocal + " " + defaultRanges
	cloud := "nonMasqueradeCIDRs:\n  - 155.128.0.0/9\n  - 10.0.0.0/8\nmasqLinkLocal: false\n"
	return []agentCase{
		{name: "defaults", files: noFiles(), destinations: usual},
		{name: "reserved ranges", flags: []string{"-nomasq-all-reserved-ranges"}, files: noFiles(), destinations: linkLocal + " " + allReserved},
		{name: "reserved ranges and a file", flags: []string{"--nomasq-all-reserved-ranges"},
			files: map[string]string{"ip-masq-agent": "masqLinkLocalIPv6: true\n"}, destinations: linkLocal},
		{name: "only link-local", files: map[string]string{"ip-masq-config-0": "masqLinkLocal: true\n"}, destinations: ""},
		{name: "explicit empty list", files: map[string]string{"ip-masq-config-0": `{"nonMasqueradeCIDRs": []}`}, destinations: linkLocal},
		{name: "null for a list", files: map[string]string{"ip-masq-config-0": `{"nonMasqueradeCIDRs": null}`}, destinations: linkLocal},
		{name: "empty file", files: map[string]string{"ip-masq-config-0": ""}, destinations: linkLocal},
		{name: "one file", destinations: "172.16.0.0/12 10.0.0.0/8",
			files: map[string]string{"ip-masq-config-0": `{"nonMasqueradeCIDRs": ["172.16.0.0/12", "10.0.0.0/8"], "masqLinkLocal": true}`}},
		{name: "example of its README", destinations: linkLocal + " 155.128.0.0/9 10.240.0.0/16 180.132.128.0/18",
			files: map[string]string{"ip-masq-agent": "nonMasqueradeCIDRs:\n  - 155.128.0.0/9\n  - 10.240.0.0/16\n  - 180.132.128.0/18\nmasqLinkLocal: false\nmasqLinkLocalIPv6: true\n"}},
		{name: "several files", flags: []string{"--enable-ipv6"}, destinations: linkLocal + " 155.128.0.0/9 10.0.0.0/8 10.240.0.0/16 180.132.128.0/18",
			files: map[string]string{"ip-masq-config-0": cloud, "ip-masqconfig-1": "masqLinkLocalIPv6: true\n",
				"ip-masqconfig-2": "nonMasqueradeCIDRs:\n  - 10.240.0.0/16\n  - 10.0.0.0/8\n  - 180.132.128.0/18\n"}},
		{name: "switches that are OR-ed", flags: []string{"--enable-ipv6"}, destinations: "172.16.0.0/12 10.0.0.0/8 1.0.0.0/8 2.2.0.0/16 fe80::/10 fc00::/7",
			files: map[string]string{
				"ip-masq-config-0": `{"nonMasqueradeCIDRs": ["172.16.0.0/12", "10.0.0.0/8", "fc00::/7"], "masqLinkLocal": false, "masqLinkLocalIPv6": false}`,
				"ip-masqconfig-1":  `{"nonMasqueradeCIDRs": ["1.0.0.0/8", "2.2.0.0/16"], "masqLinkLocal": true, "masqLinkLocalIPv6": false}`}},
		{name: "empty list in one file", destinations: linkLocal + " 10.9.0.0/16",
			files: map[string]string{"ip-masq-a": "nonMasqueradeCIDRs: []\n", "ip-masq-b": "nonMasqueradeCIDRs: [10.9.0.0/16]\n"}},
		{name: "file name with another prefix", destinations: linkLocal + " 111.254.0.0/15 8.0.0.0/8",
			files: map[string]string{"ip-masq-config-0": `{"nonMasqueradeCIDRs": ["111.254.0.0/15", "8.0.0.0/8"]}`,
				"bad-prefix-config-1": `{"nonMasqueradeCIDRs": ["4.4.0.0/8", "6.7.0.0/16"], "masqLinkLocal": true, "masqLinkLocalIPv6": true}`}},
		{name: "only file names with another prefix", destinations: usual,
			files: map[string]string{"bad-prefix-config-0": `{"nonMasqueradeCIDRs": ["225.255.240.0/20"]}`, "IP-MASQ-AGENT": "{*"}},
		{name: "other chain", flags: []string{"--masq-chain=OTHER_2"}, files: noFiles(), destinations: usual},
		{name: "random-fully off", files: noFiles(), destinations: usual, extraFlags: []string{"--random-fully=false"}},
	}
}

// manyPrefixes returns /24 prefixes that no other case uses.
func manyPrefixes(count int) []string {
	var all []string
	for i := range count {
		all = append(all, fmt.Sprintf("20.%d.%d.0/24", i/250, i%250))
	}
	return all
}

// TestAgentCases writes an agent's chain and ip-masq's chain from the same files and flags, on two
// nodes. It checks that the rules are equal and that they exempt what the agent's documentation
// says.
func TestAgentCases(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		for _, dialect := range []string{"v1", "v2"} {
			t.Run(f.name+" "+dialect, func(t *testing.T) {
				agentNode, ownNode := newNode(t, f), newNode(t, f)
				cases := agentV1Cases()
				if dialect == "v2" {
					cases = agentV2Cases()
				}
				want := map[string]map[string][]string{}
				for i, c := range cases {
					t.Run(c.name, func(t *testing.T) {
						dir := c.writeFiles(t, ownNode, i)
						a := readAsAgent(t, dialect, dir, c.flags)
						a.random = a.random || a.second && c.extraFlags == nil // ip-masq-agent-v2 has no such flag
						a.write(t, agentNode)
						want[c.name] = agentNode.chainRules(t, a.chain)
						wantDestinations(t, c, want[c.name])
						ownNode.onceWithAgentFiles(t, dialect, dir, c)
						wantSameRules(t, want[c.name], ownNode.chainRules(t, a.chain))
						agentNode.removeRulesAndState(t)
						ownNode.removeRulesAndState(t)
					})
				}
				// Change from one case to the next, as administrators edit ConfigMaps and
				// DaemonSets.
				for i, c := range slices.Backward(cases) {
					if c.files == nil {
						continue // the stored policy stays
					}
					t.Run("changed to "+c.name, func(t *testing.T) {
						dir := c.writeFiles(t, ownNode, i)
						ownNode.onceWithAgentFiles(t, dialect, dir, c)
						wantSameRules(t, want[c.name], ownNode.chainRules(t, readAsAgent(t, dialect, dir, c.flags).chain))
					})
				}
			})
		}
	}
}

// writeFiles writes the files of a case and returns their directory.
func (c agentCase) writeFiles(t *testing.T, n *node, nth int) string {
	t.Helper()
	dir := filepath.Join(n.dir, fmt.Sprint("config", nth))
	if c.files == nil {
		return dir
	}
	must(t, os.MkdirAll(dir, 0o755))
	for name, text := range c.files {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	return dir
}

// onceWithAgentFiles runs `ip-masq-reconciler once` with the files and flags of a case.
func (n *node) onceWithAgentFiles(t *testing.T, dialect, dir string, c agentCase) {
	t.Helper()
	args := slices.Concat([]string{"once"}, c.flags, c.extraFlags, []string{"--agent-config-dir", dir, "--agent-dialect", dialect})
	n.wantSays(t, 0, nil, args...)
}

// wantDestinations fails the test unless the chains exempt exactly the destinations that the
// agent's documentation names.
func wantDestinations(t *testing.T, c agentCase, rules map[string][]string) {
	t.Helper()
	got := []string{}
	exempt := regexp.MustCompile(`^-A \S+ (?:-d (\S+) )?-j RETURN$`)
	for i, f := range families() {
		for _, rule := range rules[f[0]] {
			if m := exempt.FindStringSubmatch(rule); m != nil {
				got = append(got, cmp.Or(m[1], []string{"0.0.0.0/0", "::/0"}[i]))
			}
		}
	}
	want := strings.Fields(c.destinations)
	slices.Sort(got)
	slices.Sort(want)
	assert.Equal(t, "what the reference agent exempts, and the documentation", want, got)
}

// wantSameRules fails the test unless the rules of two nodes are equal.
func wantSameRules(t *testing.T, want, got map[string][]string) {
	t.Helper()
	assert.Equal(t, "rules of ip-masq (+) and of the agent (-)", got, want)
}

// daemonSet is the container of an agent's DaemonSet.
type daemonSet struct {
	name, dialect string
	args          []string
	warns         []string // flags that the reconciler accepts and ignores
	verbose       bool     // logs each sync
}

func daemonSets() []daemonSet {
	return []daemonSet{
		{name: "none", dialect: "v1"},
		{name: "all flags with two dashes", dialect: "v1", args: []string{"--masq-chain=IP-MASQ", "--nomasq-all-reserved-ranges", "--enable-ipv6",
			"--random-fully=false", "--to-ports=1024-29999,32768-65535"}},
		{name: "all flags with one dash", dialect: "v1", args: []string{"-masq-chain=IP-MASQ", "-nomasq-all-reserved-ranges", "-enable-ipv6=true",
			"-random-fully=false", "-to-ports=1024-29999,32768-65535"}},
		{name: "flag and value as two arguments", dialect: "v1", args: []string{"-masq-chain", "IP-MASQ", "--to-ports", "2000-2999", "-v", "2", "--stderrthreshold", "0"},
			warns: []string{"stderrthreshold"}, verbose: true},
		{name: "verbosity with one dash", dialect: "v1", args: []string{"-v=2", "--enable-ipv6=false"}, verbose: true},
		{name: "other spellings of a boolean", dialect: "v1", args: []string{"--nomasq-all-reserved-ranges=T", "--random-fully=0", "--enable-ipv6=1"}},
		{name: "klog flags", dialect: "v1", args: []string{"--logtostderr", "--v=2", "--stderrthreshold=0", "-alsologtostderr=false", "--add_dir_header", "-skip_headers=true", "--vmodule=a=2"},
			warns: []string{"logtostderr", "stderrthreshold", "alsologtostderr", "add-dir-header", "skip-headers", "vmodule"}, verbose: true},
		{name: "ip-masq-agent-v2", dialect: "v2", args: []string{"--v=2", "--resync-interval=60"}, verbose: true},
		{name: "ip-masq-agent-v2 with one dash", dialect: "v2", args: []string{"-resync-interval", "60", "-nomasq-all-reserved-ranges", "-masq-chain=AZURE", "-enable-ipv6"}},
	}
}

// TestAgentDaemonSetFlags starts the reconciler with the args of an agent's DaemonSet, as after a
// change of the image: without a command, with flags in the agents' spelling. It checks that the
// rules equal the agent's.
func TestAgentDaemonSetFlags(t *testing.T) {
	t.Parallel()
	agentNode, ownNode := newNode(t, backends()[1]), newNode(t, backends()[1]) // TestAgentCases has both variants
	for i, c := range daemonSets() {
		for what, files := range map[string]map[string]string{"no files": noFiles(), "a file": singleFile("masqLinkLocal: true\nnonMasqueradeCIDRs: [10.9.0.0/16]\n")} {
			t.Run(c.name+" and "+what, func(t *testing.T) {
				at := 2 * i
				if len(files) > 0 {
					at++
				}
				dir := agentCase{files: files}.writeFiles(t, ownNode, at)
				a := readAsAgent(t, c.dialect, dir, c.args)
				a.random = a.random || a.second // ip-masq-agent-v2 has no such flag
				a.write(t, agentNode)
				want := agentNode.chainRules(t, a.chain)
				log := ownNode.runWithAgentFlags(t, slices.Concat([]string{"--agent-config-dir", dir, "--agent-dialect", c.dialect}, c.args))
				wantSameRules(t, want, ownNode.chainRules(t, a.chain))
				var warned []string
				for line := range strings.Lines(log) {
					if _, flag, found := strings.Cut(line, "flag=--"); found {
						warned = append(warned, strings.TrimSpace(flag))
					}
				}
				slices.Sort(warned)
				slices.Sort(c.warns)
				wantSame(t, "warnings about flags", warned, c.warns)
				if logged := strings.Contains(log, "msg=sync"); logged != c.verbose {
					t.Errorf("logs each sync: %v, want %v:\n%s", logged, c.verbose, log)
				}
				agentNode.removeRulesAndState(t)
				ownNode.removeRulesAndState(t)
			})
		}
	}
}

// runWithAgentFlags runs the reconciler with only args until it is ready at its default address,
// and stops it. It returns the log.
func (n *node) runWithAgentFlags(t *testing.T, args []string) string {
	t.Helper()
	ctx, kill := context.WithCancel(t.Context())
	defer kill()
	c := n.reconcilerCommand(ctx, t, args...)
	var log journal
	c.Stdout, c.Stderr = &log, &log
	must(t, c.Start())
	ready := timelimit.Await(timelimit.Wait, func() bool { return n.isReady("127.0.0.1:19820") })
	must(t, c.Process.Signal(syscall.SIGTERM))
	_ = c.Wait() // the exit code is checked below
	log.mu.Lock()
	defer log.mu.Unlock()
	if code := c.ProcessState.ExitCode(); !ready || code != 0 {
		t.Fatalf("%q: ready %v, exit code %d after SIGTERM\n%s", args, ready, code, log.text.String())
	}
	return log.text.String()
}
