// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// fixture makes binaries for three architectures and returns the arguments.
func fixture(t *testing.T) (out string, args []string) {
	t.Helper()
	dir := t.TempDir()
	for _, arch := range []string{"amd64", "arm64", "s390x"} {
		assert.NoError(t, os.Mkdir(filepath.Join(dir, arch), 0o755))
		for _, name := range []string{"ip-masq", "ip-masq-reconciler"} {
			assert.NoError(t, os.WriteFile(filepath.Join(dir, arch, name), []byte(name+" for "+arch), 0o700))
		}
	}
	out = filepath.Join(dir, "out.tar")
	return out, []string{"-name", "example.net/a:v1", "-version", "v1", "-binaries", dir, "-license", "../../LICENSE", "-out", out}
}

// members reads a tar; those that are gzips of tars are read too.
func members(t *testing.T, in io.Reader) map[string]string {
	t.Helper()
	all := map[string]string{}
	for r := tar.NewReader(in); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		assert.NoError(t, err)
		data := assert.Must(io.ReadAll(r))(t)
		all[h.Name] = string(data)
		if packed, err := gzip.NewReader(bytes.NewReader(data)); err == nil {
			for name, text := range members(t, packed) {
				all[h.Name+"!"+name] = text
			}
		}
	}
}

func TestImage(t *testing.T) {
	out, args := fixture(t)
	assert.NoError(t, run(t.Context(), args, io.Discard))
	archive := assert.Must(os.Open(out))(t)
	defer archive.Close()
	var programs, configurations []string
	for name, text := range members(t, archive) {
		switch _, path, inLayer := strings.Cut(name, "!"); {
		case inLayer && path != "LICENSE":
			programs = append(programs, path+": "+text)
		case strings.Contains(text, `"rootfs"`):
			var c struct {
				Architecture string
				Config       struct{ Entrypoint, Cmd, Env []string }
			}
			assert.NoError(t, json.Unmarshal([]byte(text), &c))
			configurations = append(configurations, c.Architecture+" "+strings.Join(c.Config.Entrypoint, " "))
		}
	}
	slices.Sort(programs)
	slices.Sort(configurations)
	want := []string{
		"ip-masq-reconciler: ip-masq-reconciler for amd64", "ip-masq-reconciler: ip-masq-reconciler for arm64", "ip-masq-reconciler: ip-masq-reconciler for s390x",
		"ip-masq: ip-masq for amd64", "ip-masq: ip-masq for arm64", "ip-masq: ip-masq for s390x",
	}
	const entrypoint = " /ip-masq-reconciler --agent-config-dir=/etc/config"
	if !slices.Equal(programs, want) || !slices.Equal(configurations, []string{"amd64" + entrypoint, "arm64" + entrypoint, "s390x" + entrypoint}) {
		t.Errorf("programs %q\nconfigurations %q", programs, configurations)
	}
}

// TestNothingHalf checks that a failed build leaves no archive.
func TestNothingHalf(t *testing.T) {
	out, args := fixture(t)
	for want, args := range map[string][]string{
		"make image": append(slices.Clone(args), "-arch", "amd64,riscv64"),
		"no tag":     append(slices.Clone(args), "-name", "example.net/a"),
		"--out":      args[:len(args)-2],
	} {
		assert.ErrorContains(t, run(t.Context(), args, io.Discard), want)
		left, err := filepath.Glob(filepath.Join(filepath.Dir(out), "*.tar*"))
		if err != nil || len(left) > 0 {
			t.Errorf("%q: %v", left, err)
		}
	}
}

// TestLayer checks that the layer has this machine's iptables with every library that it loads.
func TestLayer(t *testing.T) {
	files := assert.Must(layer("/", nil))(t)
	names := map[string]string{}
	for _, f := range files {
		names[f.Name] = f.Link
	}
	for name, link := range map[string]string{
		"usr/sbin/iptables": nftProgram, "usr/sbin/ip6tables-restore": nftProgram, "usr/sbin/ip6tables-nft-save": nftProgram,
		"usr/sbin/iptables-legacy": legacyProgram, "usr/sbin/ip6tables-legacy-restore": legacyProgram, "usr/sbin/" + nftProgram: "",
	} {
		if got, there := names[name]; !there || got != link {
			t.Errorf("%s: there %v, a link to %q", name, there, got)
		}
	}
	has := func(part string) bool {
		return slices.ContainsFunc(files, func(f oci.File) bool { return strings.Contains(f.Name, part) })
	}
	for _, part := range []string{"etc/os-release", "libxt_addrtype.so", "libip4tc.so", "libxtables.so", "libc.so", "/ld-linux", "libnftnl.so"} {
		if !has(part) {
			t.Errorf("nothing called %s", part)
		}
	}
}

// TestKeptPackages checks that kept packages are used without a network, and only as they were downloaded.
func TestKeptPackages(t *testing.T) {
	kept := t.TempDir()
	packages := filepath.Join(kept, "amd64")
	for _, name := range closure() {
		source := filepath.Join(t.TempDir(), name)
		control := "Package: " + name + "\nVersion: 1\nArchitecture: amd64\nMaintainer: a <a@example.net>\nDescription: a\n"
		if err := errors.Join(os.MkdirAll(filepath.Join(source, "DEBIAN"), 0o755), os.MkdirAll(packages, 0o755),
			os.WriteFile(filepath.Join(source, "DEBIAN", "control"), []byte(control), 0o644)); err != nil {
			t.Fatal(err)
		}
		assert.NoError(t, command(t.Context(), packages, nil, "dpkg-deb", "--build", source, name+"_1_amd64.deb"))
	}
	sums := assert.Must(sumsOf(packages))(t)
	assert.NoError(t, os.WriteFile(filepath.Join(packages, sumsFile), []byte(sums), 0o644))
	unpack := func() (string, error) {
		dir := t.TempDir()
		root := filepath.Join(dir, "root")
		return root, debian{packages: kept}.unpack(t.Context(), "amd64", dir, root)
	}
	root := assert.Must(unpack())(t)
	status, err := os.ReadFile(filepath.Join(root, statusDir, "libc6"))
	if err != nil || !strings.HasPrefix(string(status), "Package: libc6\nVersion: 1\n") {
		t.Errorf("status of libc6: %v\n%s", err, status)
	}
	deb := filepath.Join(packages, "libc6_1_amd64.deb")
	data := assert.Must(os.ReadFile(deb))(t)
	for what, change := range map[string]func() error{
		"another program in libc6": func() error { return os.Rename(filepath.Join(packages, "iptables_1_amd64.deb"), deb) },
		"a package too many":       func() error { return os.WriteFile(filepath.Join(packages, "more_1_amd64.deb"), data, 0o644) },
	} {
		before, err := os.ReadFile(filepath.Join(packages, "iptables_1_amd64.deb"))
		assert.NoError(t, errors.Join(err, change()))
		if _, err := unpack(); err == nil || !strings.Contains(err.Error(), "are not those of its SHA256SUMS") {
			t.Errorf("%s: %v", what, err)
		}
		assert.NoError(t, errors.Join(os.WriteFile(deb, data, 0o644), os.WriteFile(filepath.Join(packages, "iptables_1_amd64.deb"), before, 0o644)))
		_ = os.Remove(filepath.Join(packages, "more_1_amd64.deb"))
	}
}

// TestLinkedMissing checks that a library without a package fails the build.
func TestLinkedMissing(t *testing.T) {
	root := t.TempDir()
	program := assert.Must(os.ReadFile("/usr/sbin/" + nftProgram))(t)
	assert.NoError(t, os.WriteFile(filepath.Join(root, nftProgram), program, 0o755))
	_, err := linked(root, []string{nftProgram})
	assert.ErrorContains(t, err, "add the one that has it to the list")
}
