// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/documents"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

const exampleDir = "../conflist-examples"

// example is a node with the conflists of one or more files, and the expected verdicts for a pod of
// the first network.
type example struct {
	files       []string
	subnet      string // of the bridge that replaces an unavailable main plugin
	exempt      string // destinations that see the pod's address
	masqueraded string // destinations that see the node's address
	output      string // an address of the node that the pod leaves with
}

func examples() []example {
	return []example{
		{files: []string{"bridge"}, exempt: "10.20.0.5", masqueraded: "198.51.100.7 172.16.3.4"},
		{files: []string{"ptp"}, exempt: "10.20.0.5 192.168.77.1", masqueraded: "198.51.100.7 172.16.3.4"},
		{files: []string{"dual-stack"}, exempt: "10.20.0.5 fd00:20::5", masqueraded: "198.51.100.7 2001:db8:7::7"},
		{files: []string{"flannel"}, subnet: "10.244.1.0/24", exempt: "10.244.7.7 10.96.0.10", masqueraded: "10.20.0.5 198.51.100.7"},
		{files: []string{"calico"}, subnet: "192.168.99.0/24", exempt: "192.168.7.7 10.96.0.10", masqueraded: "10.20.0.5 198.51.100.7"},
		{files: []string{"cilium"}, subnet: "10.244.1.0/24", exempt: "10.20.0.5", masqueraded: "198.51.100.7 172.16.3.4"},
		{files: []string{"kindnet"}, exempt: "10.244.9.9", masqueraded: "10.20.0.5 198.51.100.7"},
		{files: []string{"many-prefixes"}, exempt: "10.0.2.5 10.3.198.255", masqueraded: "10.0.1.5 10.3.199.0 198.51.100.7"},
		{files: []string{"masquerade-only-these"}, exempt: "10.20.0.5 192.0.2.7", masqueraded: "198.51.100.7 203.0.113.77"},
		{files: []string{"forced-inside-exempt"}, exempt: "10.20.0.5 10.199.255.255", masqueraded: "10.200.1.1 198.51.100.7"},
		{files: []string{"scoped-to-pods"}, exempt: "10.20.0.5 172.16.3.4", masqueraded: "198.51.100.7"},
		{files: []string{"output-address"}, exempt: "10.20.0.5", output: "198.51.100.7"},
		{files: []string{"guard-drop"}, exempt: "10.20.0.5", masqueraded: "198.51.100.7 172.16.3.4"},
		{files: []string{"two-networks-blue", "two-networks-green"}, exempt: "172.16.3.4", masqueraded: "10.20.0.5 198.51.100.7"},
		{files: []string{"from-ip-masq-agent"}, exempt: "10.20.0.5 192.168.7.7 172.16.3.4", masqueraded: "198.51.100.7"},
		{files: []string{"from-ip-masq-agent-v2"}, exempt: "10.20.0.5", masqueraded: "172.16.3.4 198.51.100.7"},
	}
}

// TestExamples runs a pod with every file in conflist-examples and checks its packets.
func TestExamples(t *testing.T) {
	t.Parallel()
	var run []string
	for _, ex := range examples() {
		run = append(run, ex.files...)
		t.Run(strings.Join(ex.files, "+"), func(t *testing.T) {
			n := newNode(t, backends()[1])
			if ex.output != "" {
				n.address(t, "address add "+ex.output+"/32 dev outside")
			}
			var pods []*pod
			for _, file := range ex.files {
				pods = append(pods, n.pod(t, n.writeExample(t, file, ex.subnet)))
			}
			s := senders{"pod": {pods[0].Host, pods[0].addrs}}
			s.verdicts(t, n, false, map[string]string{"pod": ex.exempt})
			s.verdicts(t, n, true, map[string]string{"pod": ex.masqueraded})
			if ex.output != "" {
				n.leaves(t, pods[0].Host, "203.0.113.77", n.Outside, ex.output)
			}
			for i, file := range ex.files {
				network := n.writeExample(t, file, ex.subnet)
				succeeds(t, "CHECK")(n.check(t, network, pods[i]))
				succeeds(t, "DEL")(n.del(t, network, pods[i]))
			}
		})
	}
	files := assert.Must(filepath.Glob(filepath.Join(exampleDir, "*")))(t)
	for _, file := range files {
		name, isExample := strings.CutSuffix(filepath.Base(file), ".conflist")
		if isExample && !slices.Contains(run, name) {
			t.Errorf("%s has no row in examples", file)
		}
		if !isExample && filepath.Base(file) != "README.md" {
			t.Errorf("%s is neither a conflist nor README.md", file)
		}
	}
}

// writeExample writes the conflist of an example and returns the name of its network. It replaces
// an unavailable main plugin by bridge.
func (n *node) writeExample(t *testing.T, file, subnet string) string {
	t.Helper()
	text := assert.Must(os.ReadFile(filepath.Join(exampleDir, file+".conflist")))(t)
	var list struct {
		CNIVersion string            `json:"cniVersion"`
		Name       string            `json:"name"`
		Plugins    []json.RawMessage `json:"plugins"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	var first struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(list.Plugins[0], &first); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	if first.Type != "bridge" && first.Type != "ptp" {
		list.Plugins[0] = json.RawMessage(fmt.Sprintf(`{"type": "bridge", "bridge": "cni0", "isGateway": true,
			"ipam": {"type": "host-local", "subnet": %q, "routes": [{"dst": "0.0.0.0/0"}]}}`, subnet))
	}
	if list.CNIVersion != "1.0.0" {
		t.Errorf("%s: cniVersion is %s; containerd 1.6 and podman 4 need 1.0.0", file, list.CNIVersion)
	}
	out := assert.Must(json.Marshal(list))(t)
	must(t, n.cni.Write(file+".conflist", string(out)))
	return list.Name
}

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
	root := assert.Must(filepath.Abs(".."))(t)
	bin := topology.BinDir(t)
	stubs := t.TempDir()
	for _, program := range strings.Fields(standIns) {
		must(t, os.Symlink(filepath.Join(root, "e2e", "testdata", "standin.sh"), filepath.Join(stubs, program)))
	}
	rest := bin + ":" + filepath.Join(bin, "cni") + ":" + os.Getenv("PATH")
	environment := append(os.Environ(), "REPOSITORY="+root, "REST="+rest, "PATH="+stubs+":"+rest, "NODE=node1", "POD=pod1")

	script := assert.Must(os.ReadFile("testdata/documents.sh"))(t)
	try := assert.Must(os.ReadFile("../docs/try.md"))(t)
	_, node, _ := strings.Cut(string(try), "unshare --net --mount bash -e <<'END'\n")
	node, _, isNode := strings.Cut(node, "\n# Install the plugin and its entry")
	if !isNode {
		t.Fatal("docs/try.md has no block for cnitool")
	}
	files := assert.Must(filepath.Glob("../docs/*.md"))(t)
	total, ran := 0, 0
	for _, document := range append(files, "../README.md", "../deploy/README.md", "../conflist-examples/README.md") {
		name := strings.TrimPrefix(document, "../")
		text := assert.Must(os.ReadFile(document))(t)
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
