// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// writeFiles writes files below a directory. A name that ends in a slash is a directory.
func writeFiles(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if name[len(name)-1] == '/' {
			must(t, os.MkdirAll(path, 0o755))
			continue
		}
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(text), 0o644))
	}
}

// TestDataDirOfAnotherProgram checks that all verbs and commands refuse a directory that ip-masq
// did not create, and change nothing in it. A user who may write NetworkAttachmentDefinitions can
// set dataDir to any directory of the node.
func TestDataDirOfAnotherProgram(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		files map[string]string
		msgs  string // a file that the message names
	}{
		"uploads": {map[string]string{
			"upload.tmp/deep/f": "1", "session.tmp": "2", "attachments/customers/invoice.pdf": "3", "record.json": `{"rows": []}`,
		}, "attachments"},
		"backups":     {map[string]string{"backups/": "", "lock": ""}, "backups"},
		"a lock file": {map[string]string{"reconciler.lock": "of a deployment"}, "reconciler.lock"},
		"a temp file": {map[string]string{"x.tmp": "1"}, "x.tmp"},
		"a lock":      {map[string]string{"lock": ""}, "lock"},
		"a record":    {map[string]string{"record.json": `{"rows": []}`}, "record.json"},
		"a directory": {map[string]string{"empty/": ""}, "empty"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, backends()[0])
			dir := filepath.Join(n.dir, "srv", "files")
			writeFiles(t, dir, c.files)
			before, rules := tree(t, dir), n.ruleset(t)
			conf := n.conf(t, "podnet", object{"dataDir": dir})
			for verb, code := range map[string]uint{"ADD": 7, "CHECK": 7, "STATUS": 50, "GC": 5, "DEL": 0} {
				n.invoke(t, invocation{verb: verb, conf: conf}).want(t, code, dir, c.msgs, "ip-masq did not make it", "set dataDir to a directory that")
			}
			for _, command := range []string{"cleanup", "once", "check"} {
				n.wantSays(t, 1, nil, command, "--data-dir", dir)
			}
			wantSame(t, "the directory", tree(t, dir), before)
			wantSame(t, "rules", n.ruleset(t), rules)
		})
	}
}

// TestInstallIntoADirectoryOfAnotherProgram checks that install and uninstall write no backups to a
// directory that ip-masq did not create.
func TestInstallIntoADirectoryOfAnotherProgram(t *testing.T) {
	t.Parallel()
	b := newUninstalledNode(t)
	b.wantSays(t, 0, nil, b.args("install", "--plugin", b.plugin(t))...)
	dir := filepath.Join(b.dir, "srv")
	writeFiles(t, dir, map[string]string{"backups/db.sql": "1", "notes": "2"})
	before := tree(t, dir)
	b.dataDir = dir
	b.wantSays(t, 1, []string{dir, "no backup is kept in the data dir"}, b.args("uninstall", "--no-wait")...)
	assert.Equal(t, "the conflist", string(readFile(t, b.conflistFile)), string(b.original))
	must(t, os.Remove(b.entry))
	b.entry = filepath.Join(b.dir, "other.json")
	must(t, os.WriteFile(b.entry, []byte(`{"type": "ip-masq", "dataDir": "`+dir+`"}`), 0o600))
	b.wantSays(t, 1, []string{dir, "set dataDir to a directory that"}, b.args("install", "--plugin", b.plugin(t))...)
	assert.Equal(t, "the conflist", string(readFile(t, b.conflistFile)), string(b.original))
	wantSame(t, "the directory", tree(t, dir), before)
}

// TestLongestDataDir checks that the comments of rules hold every dataDir that a key may state.
func TestLongestDataDir(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.dataDir = n.dir + "/data+@" // of a name that takes the rest of the 200 bytes
		n.dataDir += strings.Repeat("x", 200-len(n.dataDir))
		n.addAndCheck(t, n.conf(t, "podnet", object{"guard": "count", "dataDir": "/" + n.dataDir + "//"}))
		wantSame(t, "rules that name the dataDir", strings.Count(n.ruleset(t), "keeps its state in "+n.dataDir), 2)
		if stdout, stderr, code := n.reconciler(t, "cleanup", "--data-dir", n.dataDir+"/"); code != 0 || strings.Contains(n.ruleset(t), n.dataDir) {
			t.Errorf("cleanup: exit code %d\n%s%s", code, stdout, stderr)
		}
	})
}

// withDataDir returns the node with another dataDir and backend for its entries.
func (n *node) withDataDir(t *testing.T, f backend, name string) *node {
	t.Helper()
	other := *n
	other.backend, other.dir = f, filepath.Join(n.dir, name)
	must(t, os.Mkdir(other.dir, 0o755))
	other.dataDir = filepath.Join(other.dir, "data")
	other.path = f.programs(t, filepath.Join(other.dir, "bin"))
	return &other
}

// standardConflist writes a conflist into /etc/cni/net.d, where the plugin looks without plugin.toml, and returns its path.
func (n *node) standardConflist(t *testing.T, network string, keys object) string {
	t.Helper()
	dir := n.own(config.DefaultCNIConfDir)
	must(t, os.MkdirAll(dir, 0o755))
	list := marshalIndent(t, object{"cniVersion": "1.1.0", "name": network, "plugins": []object{n.bridge(network), n.entry(keys)}})
	path := filepath.Join(dir, "10-"+network+".conflist")
	writeTempFile(t, path, string(list))
	return path
}

// onPairsOfForms runs a test for a node in each backend and the entries of a second dataDir in each
// backend, with the same and with another chain name.
func pairsOfBackends(t *testing.T, test func(t *testing.T, n, other *node, chain string)) {
	t.Helper()
	for _, f := range backends() {
		for _, g := range backends() {
			for _, chain := range []string{"IP-MASQ-AGENT", "OTHER"} {
				t.Run(fmt.Sprintf("%s, other %s %s", f.name, g.name, chain), func(t *testing.T) {
					n := newNode(t, f)
					test(t, n, n.withDataDir(t, g, "other"), chain)
				})
			}
		}
	}
}

// wantNoWrites calls a function that must not write a rule or create the dataDir. It also watches
// the programs that write rules, because iptables-legacy has no commits.
func (n *node) wantNoWrites(t *testing.T, do func()) {
	t.Helper()
	path := n.path
	defer func() { n.path = path }()
	var log string
	n.path, log = n.tracePrograms(t)
	watcher := n.watchCommits(t)
	rules, state := n.ruleset(t), tree(t, n.dataDir)
	before := watcher.untilIdle(t, 50*time.Millisecond)
	do()
	if after := watcher.untilIdle(t, 50*time.Millisecond); after != before {
		t.Errorf("commits: %s", watcher.countByProgram(before))
	}
	for _, call := range tracedCalls(t, log) {
		if strings.Contains(call, "-restore") {
			t.Errorf("ran %s", call)
		}
	}
	wantSame(t, "rules", n.ruleset(t), rules)
	wantSame(t, "files", tree(t, n.dataDir), state)
	must(t, os.RemoveAll(filepath.Join(n.dir, "traps")))
}

// TestSecondDataDir checks that without plugin.toml the first dataDir in use is the node's, and
// that a second one is refused before it writes anything, with any chain and backend.
func TestSecondDataDir(t *testing.T) {
	t.Parallel()
	pairsOfBackends(t, func(t *testing.T, n, second *node, chain string) {
		n.addAndCheck(t, n.conf(t, "podnet", nil))
		conf := second.conf(t, "blue", object{"masqChain": chain})
		says := []string{n.dataDir, second.dataDir, "a node has one dataDir"}
		second.wantNoWrites(t, func() {
			second.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 7, says...)
			second.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, says...)
			second.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0)
			second.invoke(t, invocation{verb: "GC", conf: conf}).want(t, 0)
		})
		second.agentFile(t, "ip-masq-agent", "masqChain: "+chain+"\n")
		second.wantNoWrites(t, func() {
			second.wantSays(t, 1, []string{"a node has one dataDir"}, "once")
			second.startReconciler(t).untilUnready(t, append(says, "state: ")...)
		})
		if _, err := os.Lstat(second.dataDir); !os.IsNotExist(err) {
			t.Errorf("the second dataDir was created: %v", err)
		}
	})
}

// TestGuardOfAnotherDataDir leaves nothing of a dataDir but its guard, which drops what a second one would
// exempt. It checks that the second is refused and writes nothing, that the commands say so, and that the
// cleanup that the message names is the way to move.
func TestGuardOfAnotherDataDir(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		second := n.withDataDir(t, n.backend, "other")
		n.addAndCheck(t, n.conf(t, "podnet", object{"guard": "drop", "podCIDRs": []string{"10.1.0.0/16"}}))
		guard := n.guardTables(t)
		n.removeRulesAndState(t)
		if n.backend.variant == "" { // nothing is left of the ruleset
			n.feed(t, guard, "nft", "-f", "-")
		}
		conf := second.conf(t, "blue", nil)
		says := []string{n.dataDir, second.dataDir, "ip-masq-guard", "a node has one dataDir"}
		second.wantNoWrites(t, func() {
			second.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 7, says...)
			second.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, says...)
			second.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0, says...)
			second.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 101)
		})
		second.agentFile(t, "ip-masq-agent", "{}\n")
		for _, command := range []string{"check", "once", "status", "doctor"} {
			stdout, stderr, _ := second.reconciler(t, command)
			wantText(t, command, stdout+stderr, n.dataDir)
		}
		wantText(t, "cleanup with the old dataDir", n.cleanup(t), "guard-IP-MASQ-AGENT")
		n.wantGuardTables(t)
		second.addAndCheck(t, conf).noWarnings(t)
	})
}

// TestFirstADDsOfTwoDataDirs runs two first ADDs with different dataDirs at the same time. It
// checks that one makes its rules and the other is refused.
func TestFirstADDsOfTwoDataDirs(t *testing.T) {
	const rounds = 10
	onEveryBackend(t, func(t *testing.T, n *node) {
		second := n.withDataDir(t, n.backend, "other")
		pair := []*node{n, second}
		confs := []string{n.conf(t, "podnet", nil), second.conf(t, "blue", object{"masqChain": "OTHER"})}
		for range rounds {
			answers := n.invokeAll(t, invocation{verb: "ADD", conf: confs[0]}, invocation{verb: "ADD", conf: confs[1]})
			first := 0
			if answers[0].code != 0 {
				first = 1
			}
			answers[first].want(t, 0)
			answers[1-first].want(t, 7, "a node has one dataDir")
			n.invoke(t, invocation{verb: "CHECK", conf: confs[first]}).want(t, 0)
			if rules := n.ruleset(t); strings.Contains(rules, pair[1-first].dataDir) {
				t.Errorf("the chain of the refused ADD exists:\n%s", rules)
			}
			for _, m := range []*node{pair[first], pair[1-first]} {
				m.wantSays(t, 0, nil, "cleanup")
			}
		}
	})
}

// TestDoctorFindsAnotherDataDir checks that doctor finds a chain of another dataDir in every
// backend and under any name, and that the commands that it names remove it.
func TestDoctorFindsAnotherDataDir(t *testing.T) {
	t.Parallel()
	pairsOfBackends(t, func(t *testing.T, n, second *node, chain string) {
		n.addAndCheck(t, n.conf(t, "podnet", object{"masqChain": "MINE"}))
		find := func() string {
			t.Helper()
			stdout, stderr, code := n.reconciler(t, "doctor", "-o", "json")
			if code != 0 {
				t.Fatalf("exit code %d\n%s%s", code, stdout, stderr)
			}
			return stdout
		}
		const id = `"id": "conflict"`
		if found := find(); strings.Contains(found, id) {
			t.Errorf("found on a node with one dataDir:\n%s", found)
		}
		comment := policy.OwnedBy(second.dataDir).Comment()
		if second.backend.variant == "" {
			n.feed(t, "table ip ip-masq { chain masq-"+chain+" { counter masquerade comment \""+comment+"\"; }; }\n", "nft", "-f", "-")
		} else {
			second.alterComment(t, chain, comment)
		}
		found := find()
		wantText(t, "doctor", found, id, chain, second.dataDir)
		both := *n
		both.path = "/usr/sbin" // a node whose chains are in both variants has the programs of both
		var answer struct{ Findings []diagnose.Finding }
		must(t, json.Unmarshal([]byte(found), &answer))
		for _, f := range answer.Findings {
			for _, m := range regexp.MustCompile(`ip-masq-reconciler (once|cleanup --data-dir \S+)`).FindAllStringSubmatch(strings.Join(f.Details, "\n"), -1) {
				if f.ID == "conflict" {
					both.reconciler(t, strings.Fields(strings.ReplaceAll(m[1], `"`, ""))...)
				}
			}
		}
		if rest := find(); strings.Contains(rest, id) {
			t.Errorf("after the remedy:\n%s", rest)
		}
		n.addAndCheck(t, n.conf(t, "podnet", object{"masqChain": "MINE"}))
	})
}
