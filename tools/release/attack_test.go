// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

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
	if err != nil || !strings.Contains(string(out), `.BuildVersion=v0.1.1touchIFSPWNtouchIFSPWN" -o`) {
		t.Errorf("make build: %v\n%s", err, out)
	}
}

// TestCheckOut: the sources of a release are those of the commit.
func TestCheckOut(t *testing.T) {
	dir, git := repository(t, map[string]string{".gitignore": "*.out\n", "a": "a", "b": "b"})
	git("update-index", "--assume-unchanged", "b")
	write(t, dir, "b", []byte("changed"))
	write(t, dir, "secret.out", []byte("secret"))
	r := &release{root: dir, work: t.TempDir(), version: "v1.2.3"}
	must(t, errors.Join(r.setCommit(t.Context()), r.checkOut(t.Context(), true)))
	if names := list(t, r.root); !slices.Equal(names, []string{".gitignore", "a", "b"}) || string(content(t, r.root, "b")) != "b" {
		t.Errorf("the sources are %q, b is %q", names, content(t, r.root, "b"))
	}
}

// TestSettings: what `go env -w` wrote on this machine does not change the programs; modules come from where it says.
func TestSettings(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "env", []byte("GOFLAGS=-tags=hostile\nGOPROXY=https://proxy.example.net\n"))
	t.Setenv("GOENV", filepath.Join(dir, "env"))
	t.Setenv("GOPROXY", "")
	r := &release{root: "."}
	must(t, r.setSettings(t.Context()))
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
		must(t, os.Mkdir(dir, 0o755))
	}
	write(t, source, "DEBIAN/control", []byte("Package: libc6\nSource: glibc (1)\nVersion: 2.36-9+deb12u1\nArchitecture: amd64\nMaintainer: a <a@example.net>\nDescription: a\n"))
	if out, err := exec.Command("dpkg-deb", "--build", source, filepath.Join(debs, "amd64", "libc6_1_amd64.deb")).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	d := &document{&v2_3.Document{}}
	must(t, d.addDebianPackages(t.Context(), &release{root: ".", debs: debs}, "amd64", ""))
	const want = "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12&upstream=glibc"
	if got := d.Packages[0].PackageExternalReferences[0].Locator; got != want {
		t.Errorf("package URL %s, want %s", got, want)
	}
}
