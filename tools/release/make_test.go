// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/documents"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
)

// sources copies the files that git knows into a directory of its own.
func sources(t *testing.T) string {
	t.Helper()
	root, dir := filepath.Join("..", ".."), filepath.Join(t.TempDir(), "sources")
	list, err := exec.Command("git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.Lines(string(list)) {
		name = strings.TrimSpace(name)
		info, err := os.Lstat(filepath.Join(root, name))
		if os.IsNotExist(err) || strings.HasPrefix(name, "docs/benchmarks/") {
			continue
		}
		data, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		target := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(target, data, info.Mode().Perm()); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func newKey(t *testing.T) string {
	t.Helper()
	key := filepath.Join(t.TempDir(), "key")
	if err := run(t.Context(), []string{"keygen", key}, io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	return key
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
// directory, with the same bytes; each change of a file is found.
func TestRelease(t *testing.T) {
	keys := t.TempDir()
	p := &page{blocks: documents.Blocks(string(content(t, filepath.Join("..", "..", "docs"), "releases.md"))), dir: sources(t)}
	another := filepath.Join(t.TempDir(), "another", "directory")
	helm, err := filepath.Abs(filepath.Join(binDir(), "deploy", "helm"))
	if err != nil {
		t.Fatal(err)
	}
	p.texts = strings.NewReplacer("/secure", keys, "OTHER", another+"/dist",
		"helm install", helm+" template", "sha256:…", "sha256:"+strings.Repeat("0", 64)) // a cluster would need the image
	p.shell(t, "git init --quiet && git add . && git commit --quiet --message=a")
	for _, commands := range []string{
		"release keygen", "git tag", "make verify PUBLIC_KEY=", "make verify DIST=dist PUBLIC_KEY=", "ALLOW_UNSIGNED=1", "helm install", "minisign -V",
	} {
		p.run(t, commands)
	}
	p.shell(t, "git clone --quiet . "+another+" && make -C "+another+" release VERSION=v0.1.0 SIGNING_KEY="+keys+"/ip-masq.key")
	p.run(t, "diff -rq")
	if len(p.blocks) != 1 || !strings.Contains(p.blocks[0].Commands, "cosign verify-blob") {
		t.Errorf("no test runs %+v; only what asks servers of sigstore and GitHub may be left out", p.blocks)
	}
	key, dist := filepath.Join(keys, "ip-masq.key"), filepath.Join(p.dir, "dist")
	again := filepath.Join(another, "dist")
	names := list(t, dist)
	if others := list(t, again); !slices.Equal(names, others) || len(names) < 10 {
		t.Fatalf("the first release has\n%q\nthe second\n%q", names, others)
	}
	for _, name := range names {
		if !bytes.Equal(content(t, dist, name), content(t, again, name)) {
			t.Errorf("%s differs between two releases", name)
		}
	}
	v := verification{dir: dist, publicKey: key + ".pub"}
	if report, err := v.verify(t.Context()); err != nil {
		t.Fatal(err)
	} else {
		t.Log(report)
		if !strings.Contains(report, "_image.tar: in a registry the image has the digest sha256:") {
			t.Errorf("the report has no digest of the image:\n%s", report)
		}
		var envelope dsse.Envelope
		if err := json.Unmarshal(content(t, dist, "ip-masq-cni_0.1.0"+provenanceType), &envelope); err != nil {
			t.Fatal(err)
		}
		digest, err := imageDigest(filepath.Join(dist, "ip-masq-cni_0.1.0_image.tar"))
		payload, decode := envelope.DecodeB64Payload()
		if want := strings.TrimPrefix(digest, "sha256:"); err != nil || decode != nil || want == "" || !strings.Contains(string(payload), want) {
			t.Errorf("the provenance has no digest %s of the image: %v, %v\n%s", want, err, decode, payload)
		}
	}
	t.Run("packages", func(t *testing.T) { testPackages(t, dist) })
	t.Run("tampering", func(t *testing.T) { testTampering(t, dist, names, key) })
	t.Run("unsigned", func(t *testing.T) { testUnsigned(t, dist) })
}

func testTampering(t *testing.T, dist string, names []string, key string) {
	other := newKey(t)
	find := func(pattern string) string {
		t.Helper()
		files, _ := filepath.Glob(filepath.Join(dist, pattern))
		if len(files) == 0 {
			t.Fatalf("there is no %s in %q", pattern, names)
		}
		return filepath.Base(files[0])
	}
	// fails wants an error that names what was changed in a copy.
	fails := func(name string, v verification, says string, change func(dir string)) {
		t.Helper()
		v.dir = t.TempDir()
		for _, name := range names {
			if err := os.Link(filepath.Join(dist, name), filepath.Join(v.dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		change(v.dir)
		if report, err := v.verify(t.Context()); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v\n%s\nwant an error with %q", name, err, report, says)
		}
	}
	remove := func(name string) func(string) {
		return func(dir string) {
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	v := verification{publicKey: key + ".pub"}
	bundle := verification{dir: t.TempDir(), publicKey: v.publicKey} // as on GitHub
	if err := os.CopyFS(bundle.dir, os.DirFS(dist)); err != nil {
		t.Fatal(err)
	}
	write(t, bundle.dir, "SHA256SUMS.sigstore.json", []byte("{}"))
	if report, err := bundle.verify(t.Context()); err != nil || !strings.HasSuffix(report, "SHA256SUMS.sigstore.json: not verified; cosign verify-blob does that") {
		t.Errorf("with cosign's signature: %v\n%s", err, report)
	}
	fails("another signature", v, "ip-masq.pub.sigstore.json does not belong", func(dir string) { write(t, dir, "ip-masq.pub.sigstore.json", nil) })
	fails("a directory as cosign's signature", v, "is not a regular file", func(dir string) {
		if err := os.Mkdir(filepath.Join(dir, "SHA256SUMS.sigstore.json"), 0o755); err != nil {
			t.Fatal(err)
		}
	})
	for _, name := range names {
		data := content(t, dist, name)
		for _, at := range []int{0, len(data) / 2, len(data) - 1} {
			fails("a flipped bit of "+name, v, "", func(dir string) {
				changed := slices.Clone(data)
				changed[at] ^= 1
				write(t, dir, name, changed)
			})
		}
		fails("without "+name, v, "", remove(name))
	}
	fails("another file", v, "extra does not belong", func(dir string) { write(t, dir, "extra", nil) })
	fails("an empty directory", v, "extra is not a regular file", func(dir string) {
		if err := os.Mkdir(filepath.Join(dir, "extra"), 0o755); err != nil {
			t.Fatal(err)
		}
	})
	fails("another key", verification{publicKey: other + ".pub"}, "is no signature", func(string) {})
	fails("a signature of another key", v, "is no signature", func(dir string) { resign(t, dir, other, false) })
	fails("no signature, and the key is stated", verification{publicKey: v.publicKey, unsigned: true}, signatureFile, remove(signatureFile))

	// Who has the key, or replaces it, must not get a release past what its files say of each other.
	own := verification{}
	wantUnknownMaker(t, dist, "the key in the release itself")
	archive, sbom := find("*.tar.gz"), find("*_linux_*"+sbomType)
	fails("another program in the archive, all signed again", own, archive+" has a program", func(dir string) {
		replaceIn(t, dir, archive)
		resign(t, dir, other, true)
	})
	fails("another SBOM, the sums signed again", own, "is about", func(dir string) {
		write(t, dir, sbom, append(content(t, dir, sbom), '\n'))
		resign(t, dir, key, false)
	})
	for pattern, says := range map[string]string{"*.deb": "", "*.rpm": "", "*_image.tar": "blob"} {
		name := find(pattern)
		fails("a changed byte in "+name+", all signed again", own, says, func(dir string) {
			data := content(t, dir, name)
			data[len(data)/2] ^= 1
			write(t, dir, name, data)
			resign(t, dir, other, true)
		})
	}
}

// resigned is a release that somebody else signs.
func resigned(dist string) release {
	return release{
		next: dist, version: "v0.1.0", number: "0.1.0", root: filepath.Join("..", ".."), commit: strings.Repeat("c", 40),
		arches: []string{runtime.GOARCH}, messages: io.Discard,
	}
}

// resign writes the sums and the signature again and, if all is set, before them the provenance and
// the keys.
func resign(t *testing.T, dist, key string, all bool) {
	t.Helper()
	keys, err := readKey(key)
	if err != nil {
		t.Fatal(err)
	}
	unlink(t, dist)
	r := resigned(dist)
	if all {
		err = r.sign(t.Context(), keys)
	} else {
		err = r.writeSums(keys)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// unlink replaces what can be links to files of another release by copies.
func unlink(t *testing.T, dist string) {
	t.Helper()
	for _, name := range list(t, dist) {
		if !isArtefact(name) || name == sumsFile || name == signatureFile {
			write(t, dist, name, content(t, dist, name))
		}
	}
}

// replaceIn appends a byte to a program of a tar.gz.
func replaceIn(t *testing.T, dist, name string) {
	t.Helper()
	var files []file
	err := readTarGz(content(t, dist, name), func(name string, mode os.FileMode, data []byte) error {
		if filepath.Base(name) == "ip-masq" {
			data = append(data, 0)
		}
		if mode.IsRegular() {
			files = append(files, file{name: name, mode: mode, data: data})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	data, err := (&release{}).tarGz(files)
	if err != nil {
		t.Fatal(err)
	}
	write(t, dist, name, data)
}

// testUnsigned: a release without a key is verified only if that is asked for.
func testUnsigned(t *testing.T, dist string) {
	for _, name := range []string{signatureFile, publicKeyFile, pemFile} {
		if err := os.Remove(filepath.Join(dist, name)); err != nil {
			t.Fatal(err)
		}
	}
	var messages strings.Builder
	r := resigned(dist)
	r.messages = &messages
	if err := r.sign(t.Context(), nil); err != nil || !strings.Contains(messages.String(), "WARNING") {
		t.Errorf("sign without a key: %v, %q", err, messages.String())
	}
	wantUnknownMaker(t, dist, "NOT SIGNED")
}

// wantUnknownMaker wants that verify without a key checks everything else, reports it, and fails for the
// maker alone, unless such releases are accepted.
func wantUnknownMaker(t *testing.T, dist, says string) {
	t.Helper()
	var report, accepted strings.Builder
	if err := run(t.Context(), []string{"verify", dist}, &report, io.Discard); err == nil || exitCode(err) != 3 || !strings.Contains(report.String(), says) {
		t.Errorf("without a key: %v, want exit code 3, and a report with %q:\n%s", err, says, report.String())
	}
	if err := run(t.Context(), []string{"verify", "-unsigned", dist}, &accepted, io.Discard); err != nil || accepted.String() != report.String() {
		t.Errorf("without a key, accepted: %v\n%s\nwant\n%s", err, accepted.String(), report.String())
	}
}

// testPackages: what a package has, and where.
func testPackages(t *testing.T, dist string) {
	var deb, rpm []string
	collect := func(to *[]string) func(string, os.FileMode, []byte) error {
		return func(name string, mode os.FileMode, data []byte) error {
			if !mode.IsRegular() {
				return nil
			}
			name = strings.TrimLeft(name, "./")
			*to = append(*to, name)
			if strings.HasSuffix(name, ".gz") {
				text, err := gunzip(data)
				if err != nil || len(text) < 100 {
					t.Errorf("%s: %d bytes, %v", name, len(text), err)
				}
			}
			if strings.HasSuffix(name, ".service") && !bytes.Contains(data, []byte("ExecStart=/usr/sbin/ip-masq-reconciler run\n")) {
				t.Errorf("%s starts another program:\n%s", name, data)
			}
			return nil
		}
	}
	for pattern, read := range map[string]func([]byte) error{
		"*.deb": func(data []byte) error { return readDeb(data, collect(&deb)) },
		"*.rpm": func(data []byte) error { return readRPM(data, collect(&rpm)) },
	} {
		files, _ := filepath.Glob(filepath.Join(dist, pattern))
		for _, path := range files {
			if err := read(content(t, dist, filepath.Base(path))); err != nil {
				t.Error(err)
			}
		}
	}
	for _, name := range []string{
		"usr/sbin/ip-masq", "usr/sbin/ip-masq-reconciler", "etc/ip-masq/reconciler.toml", "etc/ip-masq/entry.json",
		"usr/share/man/man8/ip-masq.8.gz", "usr/share/man/man8/ip-masq-reconciler-uninstall.8.gz",
		"usr/share/bash-completion/completions/ip-masq-reconciler", "usr/share/doc/ip-masq-cni/conflist-examples/bridge.conflist",
		"usr/share/doc/ip-masq-cni/THIRD-PARTY-LICENSES.gz",
	} {
		if !slices.Contains(deb, name) || !slices.Contains(rpm, name) {
			t.Errorf("the packages lack %s:\n%q\n%q", name, deb, rpm)
		}
	}
	if !slices.Contains(deb, "lib/systemd/system/"+unit) || !slices.Contains(rpm, "usr/lib/systemd/system/"+unit) {
		t.Errorf("the packages lack the unit:\n%q\n%q", deb, rpm)
	}
}

// TestMistakes: what cannot be released leaves nothing behind.
func TestMistakes(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "precious", []byte("data"))
	if err := run(t.Context(), []string{"make", "-version", "v1.2.3", "-dist", dir}, io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), "is not empty") {
		t.Errorf("a directory with files: %v", err)
	}
	for _, version := range []string{"", "0.1.0", "v1", "v1.2.3+build", "v1.2.3-rc 1"} {
		err := run(t.Context(), []string{"make", "-version", version, "-dist", filepath.Join(dir, "dist")}, io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), "-version") {
			t.Errorf("version %q: %v", version, err)
		}
	}
	key := newKey(t)
	if err := generateKey(key); err == nil {
		t.Error("keygen replaced a key")
	}
	if names := list(t, dir); len(names) != 1 {
		t.Errorf("there is %q", names)
	}
}

func gunzip(data []byte) ([]byte, error) {
	zip, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	return io.ReadAll(zip)
}

func list(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func content(t *testing.T, dir, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// write replaces a file, which can be a link to that of another release.
func write(t *testing.T, dir, name string, data []byte) {
	t.Helper()
	if err := os.Remove(filepath.Join(dir, name)); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
		t.Fatal(err)
	}
}
