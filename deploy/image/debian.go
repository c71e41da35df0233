// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
)

// debian is the source of packages, and the directory that keeps them, "" for none.
type debian struct{ mirror, suite, packages string }

// closure returns the packages with both variants of iptables and their libraries. The function
// linked reports missing ones.
func closure() []string {
	return []string{
		"iptables", "libc6", "libip4tc2", "libip6tc2", "libmnl0", "libnetfilter-conntrack3", "libnfnetlink0", "libnftnl11", "libxtables12",
	}
}

// iptables returns the files of a layer with iptables for an architecture. The
// machine's own packages, and what apt and dpkg know of them, are not touched.
func (d debian) iptables(ctx context.Context, arch string) (files []oci.File, err error) {
	dir, err := os.MkdirTemp("", "ip-masq-image-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	root := filepath.Join(dir, "root")
	if err := d.unpack(ctx, arch, dir, root); err != nil {
		return nil, fmt.Errorf("get packages of Debian %s: %w", d.suite, err)
	}
	return layer(root, closure())
}

// unpack unpacks the packages into root. It downloads those that are not kept, in dir.
func (d debian) unpack(ctx context.Context, arch, dir, root string) error {
	for _, below := range []string{"state/lists/partial", "cache/archives/partial", "etc/preferences.d", "etc/trusted.gpg.d", "packages", "root"} {
		if err := os.MkdirAll(filepath.Join(dir, below), 0o755); err != nil {
			return err
		}
	}
	const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
	var sources strings.Builder
	for _, s := range [][2]string{{"debian", d.suite}, {"debian", d.suite + "-updates"}, {"debian-security", d.suite + "-security"}} {
		fmt.Fprintf(&sources, "deb [signed-by=%s] %s/%s %s main\n", keyring, d.mirror, s[0], s[1])
	}
	for name, text := range map[string]string{
		"etc/sources.list": sources.String(),
		"state/status":     "",
		"apt.conf": fmt.Sprintf(`Dir "%[1]s/";
Dir::State "state"; Dir::State::status "%[1]s/state/status";
Dir::Cache "cache"; Dir::Etc "etc";
APT::Architecture "%[2]s"; APT::Architectures { "%[2]s"; };
APT::Sandbox::User ""; Acquire::Languages "none"; Acquire::Retries "3"; Dir::Log "%[1]s";
`, dir, arch),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	packages := filepath.Join(dir, "packages")
	if d.packages != "" {
		packages = filepath.Join(d.packages, arch)
		if err := os.MkdirAll(packages, 0o755); err != nil {
			return err
		}
	}
	find := func() ([]string, error) { return filepath.Glob(filepath.Join(packages, "*.deb")) }
	all, err := find()
	if err == nil && len(all) < len(closure()) {
		if err := d.download(ctx, dir, packages); err != nil {
			return err
		}
		all, err = find()
	}
	if err != nil {
		return err
	}
	if len(all) != len(closure()) {
		return fmt.Errorf("%d packages of %d in %s", len(all), len(closure()), packages)
	}
	for _, p := range all {
		if err := command(ctx, packages, nil, "dpkg-deb", "-x", p, root); err != nil {
			return err
		}
	}
	return nil
}

// download downloads the packages, with the configuration of apt in dir.
func (debian) download(ctx context.Context, dir, packages string) error {
	apt := func(args ...string) error {
		return command(ctx, packages, []string{"APT_CONFIG=" + filepath.Join(dir, "apt.conf")}, "apt-get", append([]string{"-q"}, args...)...)
	}
	if err := apt("update", "--error-on=any"); err != nil {
		return err
	}
	return apt(append([]string{"download"}, closure()...)...)
}

// command runs a program, with more in its environment, and has its output in the
// error if it fails.
func command(ctx context.Context, dir string, env []string, name string, args ...string) error {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = dir
	c.Env = append(os.Environ(), env...)
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, args[0], err, out)
	}
	return nil
}

// layer selects the programs, their libraries, and every package's copyright from an unpacked root.
func layer(root string, packages []string) ([]oci.File, error) {
	var files []oci.File
	const programs = "usr/sbin"
	entries, err := os.ReadDir(filepath.Join(root, programs))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(root, programs, e.Name()))
		if err == nil && (target == nftProgram || target == legacyProgram) {
			files = append(files, oci.File{Name: programs + "/" + e.Name(), Mode: fs.ModeSymlink | 0o777, Link: target})
		}
	}
	// Under the plain names Debian's alternatives have the variant of nf_tables.
	for _, base := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			files = append(files, oci.File{Name: programs + "/" + base + suffix, Mode: fs.ModeSymlink | 0o777, Link: nftProgram})
		}
	}
	extensions, err := filepath.Glob(filepath.Join(root, "usr/lib/*/xtables/*.so"))
	if err != nil {
		return nil, err
	}
	if len(extensions) == 0 {
		return nil, errors.New("iptables has no extensions")
	}
	start := []string{programs + "/" + nftProgram, programs + "/" + legacyProgram}
	for _, path := range extensions {
		name, err := filepath.Rel(root, path)
		if err != nil {
			return nil, err
		}
		start = append(start, name)
	}
	linked, err := linked(root, start)
	if err != nil {
		return nil, err
	}
	for _, p := range packages {
		linked = append(linked, "usr/share/doc/"+p+"/copyright")
	}
	for _, name := range linked {
		path := filepath.Join(root, name)
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		files = append(files, oci.File{Name: name, Mode: info.Mode().Perm(), Data: data})
	}
	return files, nil
}
