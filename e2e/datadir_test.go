// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
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
			for verb, code := range map[string]uint{"ADD": 100, "CHECK": 101, "STATUS": 50, "GC": 0, "DEL": 0} {
				n.invoke(t, invocation{verb: verb, conf: conf}).want(t, code, dir, c.msgs, "ip-masq did not make it", "set dataDir to a directory that")
			}
			for _, command := range []string{"cleanup", "once", "check"} {
				n.wantSays(t, 1, nil, command, "--data-dir", dir)
			}
			if d := cmp.Diff(before, tree(t, dir)); d != "" {
				t.Errorf("the directory changed:\n%s", d)
			}
			wantSame(t, "rules", n.ruleset(t), rules)
		})
	}
}

// TestInstallIntoADirectoryOfAnotherProgram checks that install and uninstall write no backups to a
// directory that ip-masq did not create.
func TestInstallIntoADirectoryOfAnotherProgram(t *testing.T) {
	t.Parallel()
	b := newUninstalledNode(t, backends()[0])
	b.install(t, b.plugin(t))
	dir := filepath.Join(b.dir, "srv")
	writeFiles(t, dir, map[string]string{"backups/db.sql": "1", "notes": "2"})
	before := tree(t, dir)
	b.dataDir = dir
	b.wantSays(t, 1, []string{dir, "no backup is kept"}, b.args("uninstall", "--no-wait")...)
	if now := readFile(t, b.conflistFile); !bytes.Equal(now, b.original) {
		t.Errorf("the plugin entry remains:\n%s", now)
	}
	must(t, os.Remove(b.entry))
	b.entry = filepath.Join(b.dir, "other.json")
	must(t, os.WriteFile(b.entry, []byte(`{"type": "ip-masq", "dataDir": "`+dir+`"}`), 0o600))
	b.wantSays(t, 1, []string{dir, "set dataDir to a directory that"}, b.args("install", "--plugin", b.plugin(t))...)
	if now := readFile(t, b.conflistFile); !bytes.Equal(now, b.original) {
		t.Errorf("the plugin entry was added:\n%s", now)
	}
	if d := cmp.Diff(before, tree(t, dir)); d != "" {
		t.Errorf("the directory changed:\n%s", d)
	}
}

// TestLongestDataDir checks that the comments of rules hold every dataDir that a key may state.
func TestLongestDataDir(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.dataDir = n.dir + "/data+@" // of a name that takes the rest of the 200 bytes
		n.dataDir += strings.Repeat("x", 200-len(n.dataDir))
		n.addAndCheck(t, n.conf(t, "podnet", object{"guard": "count", "dataDir": "/" + n.dataDir + "//"}))
		if rules := n.ruleset(t); strings.Count(rules, "keeps its state in "+n.dataDir) != 2 {
			t.Errorf("chain and guard do not name the dataDir:\n%s", rules)
		}
		if stdout, stderr, code := n.reconciler(t, "cleanup", "--data-dir", n.dataDir+"/"); code != 0 || strings.Contains(n.ruleset(t), n.dataDir) {
			t.Errorf("cleanup: exit code %d\n%s%s", code, stdout, stderr)
		}
	})
}
