// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"
)

// repository makes a git repository with one commit of files. It returns it, and runs git in it.
func repository(t *testing.T, files map[string]string) (string, func(args ...string) string) {
	t.Helper()
	dir := t.TempDir()
	git := func(args ...string) string {
		t.Helper()
		c := exec.Command("git", append([]string{"-C", dir, "-c", "user.name=a", "-c", "user.email=a@example.net"}, args...)...)
		c.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null")
		out, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("git %q: %v\n%s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	for name, text := range files {
		write(t, dir, name, []byte(text))
	}
	git("init", "--quiet")
	git("add", ".")
	git("commit", "--quiet", "--message=a")
	return dir, git
}

// TestVersionOfTag: the name of a tag, which git fetches from anybody, is no command.
func TestVersionOfTag(t *testing.T) {
	dir, git := repository(t, map[string]string{"Makefile": string(content(t, filepath.Join("..", ".."), "Makefile"))})
	git("tag", "v0.1.1\"`touch${IFS}PWN`\"$(touch${IFS}PWN);|'")
	c := exec.Command("make", "--dry-run", "build")
	c.Dir = dir
	c.Env = append(os.Environ(), "MAKEFLAGS=", "VERSION=")
	c.Env = slices.DeleteFunc(c.Env, func(v string) bool { return strings.HasPrefix(v, "VERSION=") })
	out, err := c.CombinedOutput()
	if err != nil || !strings.Contains(string(out), `-X main.version=v0.1.1touchIFSPWNtouchIFSPWN" -o`) {
		t.Errorf("make build: %v\n%s", err, out)
	}
}

// TestCheckOut: the sources of a release are those of the commit, and the provenance names a tag that is the commit.
func TestCheckOut(t *testing.T) {
	dir, git := repository(t, map[string]string{".gitignore": "*.out\n", "a": "a", "b": "b"})
	git("update-index", "--assume-unchanged", "b")
	write(t, dir, "b", []byte("changed"))
	write(t, dir, "secret.out", []byte("secret"))
	prepare := func() *release {
		t.Helper()
		r := &release{root: dir, work: t.TempDir(), version: "v1.2.3"}
		if err := r.setCommit(t.Context()); err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := prepare()
	if err := r.checkOut(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if names := list(t, r.root); !slices.Equal(names, []string{".gitignore", "a", "b"}) || string(content(t, r.root, "b")) != "b" {
		t.Errorf("the sources are %q, b is %q", names, content(t, r.root, "b"))
	}
	if r.tagged {
		t.Error("there is no tag, and the provenance names one")
	}
	git("tag", "v1.2.3")
	if r := prepare(); !r.tagged {
		t.Error("the provenance does not name the tag")
	}
	git("commit", "--quiet", "--allow-empty", "--message=b")
	if r := prepare(); r.tagged {
		t.Error("the provenance names the tag of another commit")
	}
}

// TestSettings: what `go env -w` wrote on this machine does not change the programs; modules come from where it says.
func TestSettings(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "env", []byte("GOFLAGS=-tags=hostile\nGOPROXY=https://proxy.example.net\n"))
	t.Setenv("GOENV", filepath.Join(dir, "env"))
	t.Setenv("GOPROXY", "")
	r := &release{root: "."}
	if err := r.setSettings(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"GOFLAGS": "", "GOPROXY": "https://proxy.example.net"} {
		if value, err := r.output(t.Context(), "go", "env", name); err != nil || value != want {
			t.Errorf("%s is %q, want %q: %v", name, value, want, err)
		}
	}
}

// TestDebianPURL: scanners find advisories by Debian's release and the source package.
func TestDebianPURL(t *testing.T) {
	debs, source := t.TempDir(), t.TempDir()
	for _, dir := range []string{filepath.Join(source, "DEBIAN"), filepath.Join(debs, "amd64")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, source, "DEBIAN/control", []byte("Package: libc6\nSource: glibc (1)\nVersion: 2.36-9+deb12u1\nArchitecture: amd64\nMaintainer: a <a@example.net>\nDescription: a\n"))
	if out, err := exec.Command("dpkg-deb", "--build", source, filepath.Join(debs, "amd64", "libc6_1_amd64.deb")).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	d := &document{&v2_3.Document{}}
	if err := d.addDebianPackages(t.Context(), &release{root: ".", debs: debs}, "amd64", ""); err != nil {
		t.Fatal(err)
	}
	const want = "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12&upstream=glibc"
	if got := d.Packages[0].PackageExternalReferences[0].Locator; got != want {
		t.Errorf("package URL %s, want %s", got, want)
	}
}

// TestHostile: verify refuses what would use all memory or stop it with a panic.
func TestHostile(t *testing.T) {
	var bomb bytes.Buffer
	zip := gzip.NewWriter(&bomb)
	archive := tar.NewWriter(zip)
	if err := archive.WriteHeader(&tar.Header{Name: "a", Typeflag: tar.TypeReg, Size: maxUnpacked + 1<<20}); err != nil {
		t.Fatal(err)
	}
	zeros := make([]byte, 1<<20)
	for range maxUnpacked/len(zeros) + 1 {
		if _, err := archive.Write(zeros); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(archive.Close(), zip.Close()); err != nil {
		t.Fatal(err)
	}
	err := readTarGz(bomb.Bytes(), func(string, os.FileMode, []byte) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "unpacks to more than 256 MiB") {
		t.Errorf("an archive of zeros: %v", err)
	}

	dir := t.TempDir()
	predicate := `{"buildDefinition": {"buildType": "a", "externalParameters": {"a": "b"}}, "runDetails": {"builder": {"id": "a"}}}`
	payload := `{"_type": "https://in-toto.io/Statement/v1", "predicateType": "` + predicateType + `", "predicate": ` + predicate +
		`, "subject": [{"name": "a", "digest": {"sha256": "` + sumOf(nil) + `"}}]}`
	envelope, err := json.Marshal(dsse.Envelope{PayloadType: payloadType, Payload: base64.StdEncoding.EncodeToString([]byte(payload))})
	if err != nil {
		t.Fatal(err)
	}
	write(t, dir, "a", nil)
	write(t, dir, "p"+provenanceType, envelope)
	if _, err := (verification{dir: dir}).verifyProvenance(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "names no commit") {
		t.Errorf("a provenance without dependencies: %v", err)
	}

	if belongs("a_1.2.3-1_arm64.deb", map[string]string{"amd64/ip-masq": "", "amd64/ip-masq-reconciler": ""}, nil) {
		t.Error("a package may have the programs of another architecture")
	}

	write(t, dir, "zz\x1b[2K\nSHA256SUMS: all is well", nil)
	err = (verification{dir: dir}).verifySums("")
	if err == nil || strings.ContainsRune(err.Error(), '\x1b') || strings.Contains(err.Error(), "\nSHA256SUMS") {
		t.Errorf("the name of a file is printed as it is: %v", err)
	}
	if err := (verification{dir: dir}).verifySums(sumOf(nil) + "  zz\x1b[2K\n"); err == nil || strings.ContainsRune(err.Error(), '\x1b') {
		t.Errorf("the name of a sum is printed as it is: %v", err)
	}
}
