// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/documents"
)

// sources copies the files that git knows into a directory of its own.
func sources(t *testing.T) string {
	t.Helper()
	root, dir := filepath.Join("..", ".."), filepath.Join(t.TempDir(), "sources")
	list, err := exec.Command("git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard").Output()
	must(t, err)
	for name := range strings.Lines(string(list)) {
		name = strings.TrimSpace(name)
		info, err := os.Lstat(filepath.Join(root, name))
		if os.IsNotExist(err) {
			continue
		}
		data, err := os.ReadFile(filepath.Join(root, name))
		must(t, err)
		target := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(target), 0o755))
		must(t, os.WriteFile(target, data, info.Mode().Perm()))
	}
	return dir
}

// page runs the blocks of commands of docs/releases.md.
type page struct {
	blocks []documents.Block
	dir    string            // of the sources
	texts  *strings.Replacer // of the page
}

// run runs the one block with a text.
func (p *page) run(t *testing.T, text string) {
	t.Helper()
	at := slices.IndexFunc(p.blocks, func(b documents.Block) bool { return strings.Contains(b.Commands, text) })
	if at < 0 {
		t.Fatalf("docs/releases.md has no further command %q", text)
	}
	b := p.blocks[at]
	p.blocks = slices.Delete(p.blocks, at, at+1)
	p.shell(t, p.texts.Replace(b.Before+"\n"+b.Commands))
}

// shell makes releases for the architectures of RELEASE_TEST_ARCHES, or that of this machine; with the image that
// has iptables if RELEASE_TEST_DEBS names a directory for its packages.
func (p *page) shell(t *testing.T, script string) {
	t.Helper()
	arches := strings.ReplaceAll(cmp.Or(os.Getenv("RELEASE_TEST_ARCHES"), runtime.GOARCH), ",", `\ `)
	c := exec.Command("bash", "-ec", script)
	c.Dir = p.dir
	c.Env = append(os.Environ(), "MAKEFLAGS= -- DEBS="+os.Getenv("RELEASE_TEST_DEBS")+" ARCHES="+arches, "GIT_CONFIG_GLOBAL=/dev/null",
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.net", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.net")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// TestRelease: the commands of docs/releases.md make a release, verify it, and make it again in another
// directory, with the same bytes; a changed release is found.
func TestRelease(t *testing.T) {
	keys := t.TempDir()
	p := &page{blocks: documents.Blocks(string(content(t, filepath.Join("..", "..", "docs"), "releases.md"))), dir: sources(t)}
	another := filepath.Join(t.TempDir(), "another", "directory")
	helm, err := filepath.Abs(filepath.Join(binDir(), "deploy", "helm"))
	must(t, err)
	p.texts = strings.NewReplacer("/secure", keys, "OTHER", another+"/dist",
		"helm install", helm+" template") // a cluster would need the image
	p.shell(t, "git init --quiet && git add . && git commit --quiet --message=a")
	for _, commands := range []string{"minisign -G", "git tag", "make verify DIST=", "helm install", "minisign -V"} {
		p.run(t, commands)
	}
	p.shell(t, "git clone --quiet . "+another+" && make -C "+another+" release VERSION=v0.1.0 SIGNING_KEY="+keys+"/ip-masq.key")
	p.run(t, "diff -r")
	if len(p.blocks) != 1 || !strings.Contains(p.blocks[0].Commands, "cosign verify-blob") {
		t.Errorf("no test runs %+v; only what asks servers of sigstore and GitHub may be left out", p.blocks)
	}
	if names := list(t, filepath.Join(p.dir, "dist")); len(names) < 10 {
		t.Errorf("the release has %q", names)
	}
	p.shell(t, "echo '{}' >dist/SHA256SUMS.sigstore.json && make verify") // as on GitHub
	for _, change := range []string{
		"echo >>dist/ip-masq-0.1.0.tgz", "rm dist/ip-masq-0.1.0.tgz", "touch dist/extra", "mkdir dist/extra", "sed -i s/0/1/ dist/SHA256SUMS", "rm dist/*.minisig",
		"rm dist/*.minisig && minisign -G -W -p other.pub -s other.key && minisign -S -s other.key -m dist/SHA256SUMS",
	} {
		p.shell(t, "rm -rf kept && cp -r dist kept && "+change+" && if make verify; then echo unnoticed; exit 1; fi; rm -rf dist && mv kept dist")
	}
}

// TestMistakes: what cannot be released leaves nothing behind.
func TestMistakes(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "precious", []byte("data"))
	if err := run(t.Context(), []string{"-version", "v1.2.3", "-dist", dir}, io.Discard); err == nil || !strings.Contains(err.Error(), "is not empty") {
		t.Errorf("a directory with files: %v", err)
	}
	for _, version := range []string{"", "0.1.0", "v1", "v1.2.3+build", "v1.2.3-rc 1"} {
		err := run(t.Context(), []string{"-version", version, "-dist", filepath.Join(dir, "dist")}, io.Discard)
		if err == nil || !strings.Contains(err.Error(), "-version") {
			t.Errorf("version %q: %v", version, err)
		}
	}
	if names := list(t, dir); len(names) != 1 {
		t.Errorf("there is %q", names)
	}
}

func list(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func content(t *testing.T, dir, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, name))
	must(t, err)
	return data
}

func write(t *testing.T, dir, name string, data []byte) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(dir, name), data, 0o644))
}
