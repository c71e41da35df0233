// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/documents"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// standIns names the programs that a minimal Debian lacks, or that need a cluster, systemd, a registry,
// the initial network namespace or a repository to write to. testdata/standin.sh stands in for them.
const standIns = `apt ausearch calicoctl ctr dmesg dnf execsnoop-bpfcc git grep helm journalctl kubectl lsof make
	modprobe ps restorecon scp skopeo sleep sysctl systemctl update-alternatives vi`

// elsewhereBlock matches blocks that download programs or need a release, which other tests check.
var elsewhereBlock = regexp.MustCompile(`git clone|cosign|minisign|DIST=|dist OTHER|dist/ip-masq`)

// placeholders has what the reader replaces, and what the node has there.
var placeholders = strings.NewReplacer(
	"; echo $?", " || echo $?", // a block ends at its first error
	"conntrack -E ", "timeout --preserve-status -s INT 0.3 conntrack -E ",
	"nft monitor ", "timeout 0.2 nft monitor || true ",
	"ps -fp PPID", "ps -fp 1",
	"HASH.bak", "*.bak",
	"sources/FILE", "sources/*",
	"POD-ADDRESS", "10.88.0.2",
	"ADDRESS/32 dev INTERFACE", "203.0.113.77/32 dev outside",
	"rm -rf /etc/ip-masq ", "rm -rf /etc/ip-masq/* ", // a mount
)

// otherOutput matches commands with outputs that docs and testdata compare, or that a stand-in does not print.
var otherOutput = regexp.MustCompile(`ip-masq-reconciler status|(?m:^(?:make|kubectl) )`)

// variable matches what differs in each run, within a quoted output.
var variable = regexp.MustCompile(`…|v0\\.1\\.0|HASH|\d{4}-\d\d-\d\d \d\d:\d\d UTC(?: \\\(\w+\\\))?|17 \d+ src|pid \d+|reset: \d+`)

// unprinted returns the lines of a quoted output that an output does not have.
func unprinted(quoted, output string) (lines []string) {
	output = strings.Join(strings.Fields(output), " ")
	for line := range strings.Lines(quoted) {
		pattern := regexp.QuoteMeta(strings.Join(strings.Fields(line), " "))
		if !regexp.MustCompile(variable.ReplaceAllString(pattern, ".*")).MatchString(output) {
			lines = append(lines, line)
		}
	}
	return lines
}

// TestDocuments runs each block of commands in the documents, on a node of its own, and compares the
// output with the quoted one. A block ends at the first command that fails.
func TestDocuments(t *testing.T) {
	t.Parallel()
	root := topology.Must(filepath.Abs(".."))(t)
	bin := topology.Must(topology.BinDir())(t)
	stubs := t.TempDir()
	for _, program := range strings.Fields(standIns) {
		must(t, os.Symlink(filepath.Join(root, "e2e", "testdata", "standin.sh"), filepath.Join(stubs, program)))
	}
	rest := bin + ":" + filepath.Join(bin, "cni") + ":" + os.Getenv("PATH")
	environment := append(os.Environ(), "REPOSITORY="+root, "REST="+rest, "PATH="+stubs+":"+rest, "NODE=node1", "POD=pod1")

	script := topology.Must(os.ReadFile("testdata/documents.sh"))(t)
	try := topology.Must(os.ReadFile("../docs/try.md"))(t)
	_, node, _ := strings.Cut(string(try), "unshare --net --mount bash -e <<'END'\n")
	node, _, isNode := strings.Cut(node, "\n# Install the plugin and its entry")
	if !isNode {
		t.Fatal("docs/try.md has no block for cnitool")
	}
	files := topology.Must(filepath.Glob("../docs/*.md"))(t)
	total, ran := 0, 0
	for _, document := range append(files, "../README.md", "../deploy/README.md", "../conflist-examples/README.md") {
		name := strings.TrimPrefix(document, "../")
		text := topology.Must(os.ReadFile(document))(t)
		all := documents.Blocks(string(text))
		total += len(all)
		all = slices.DeleteFunc(all, func(b documents.Block) bool { return elsewhereBlock.MatchString(b.Commands) })
		ran += len(all)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The reader's directory has the repository, the programs, and the files beside the document.
			dir := t.TempDir()
			must(t, os.Mkdir(filepath.Join(dir, "dist"), 0o755))
			for _, from := range []string{filepath.Join(root, "*"), filepath.Join(bin, "ip-masq*"), filepath.Join(filepath.Dir(document), "*.conflist")} {
				files, _ := filepath.Glob(from)
				for _, file := range files {
					file, _ = filepath.Abs(file)
					must(t, os.Symlink(file, filepath.Join(dir, filepath.Base(file))))
				}
			}
			for _, b := range all {
				c := exec.Command("unshare", "--net", "--mount", "bash", "-c", string(script), "documents.sh",
					node, b.Before, placeholders.Replace(b.Commands))
				c.Dir, c.Env = dir, environment
				out, err := c.CombinedOutput()
				if lines := unprinted(b.Output, string(out)); err != nil || len(lines) > 0 && !otherOutput.MatchString(b.Commands) {
					t.Errorf("%s:%d: %v\n%s\nprinted\n%s\nand lacks %q", name, b.Line, err, b.Commands, out, lines)
				}
			}
		})
	}
	if t.Logf("runs %d of %d blocks", ran, total); ran < 100 {
		t.Errorf("runs %d blocks: the pattern is wrong", ran)
	}
}
