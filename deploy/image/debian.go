// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
)

// debian is the source of packages, and the directory that keeps them, "" for none.
type debian struct{ mirror, suite, packages string }

// sumsFile has the SHA-256 of the packages that a directory keeps, as sha256sum prints them.
const sumsFile = "SHA256SUMS"

// closure returns the packages with both variants of iptables and their libraries, and with the version
// of Debian, by which scanners find its advisories. The function linked reports missing ones.
func closure() []string {
	return []string{
		"base-files", "iptables", "libc6", "libip4tc2", "libip6tc2", "libmnl0", "libnetfilter-conntrack3", "libnfnetlink0", "libnftnl11", "libxtables12",
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
	}
	if err := d.keep(ctx, dir, packages); err != nil {
		return err
	}
	all, err := filepath.Glob(filepath.Join(packages, "*.deb"))
	if err != nil {
		return err
	}
	status := filepath.Join(root, statusDir)
	if err := os.MkdirAll(status, 0o755); err != nil {
		return err
	}
	for _, p := range all {
		if err := command(ctx, packages, nil, "dpkg-deb", "-x", p, root); err != nil {
			return err
		}
		fields, err := exec.CommandContext(ctx, "dpkg-deb", "--field", p).Output()
		if err != nil {
			return fmt.Errorf("dpkg-deb --field %s: %w", p, err)
		}
		name, _, _ := strings.Cut(filepath.Base(p), "_")
		if err := os.WriteFile(filepath.Join(status, name), fields, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// keep ensures that a directory has the packages, each with the SHA-256 that it had when apt verified
// its signature. It downloads them unless the directory has a list of all of them.
func (d debian) keep(ctx context.Context, dir, packages string) error {
	sums, err := os.ReadFile(filepath.Join(packages, sumsFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if strings.Count(string(sums), "\n") < len(closure()) {
		return d.download(ctx, dir, packages)
	}
	have, err := sumsOf(packages)
	if err == nil && have != string(sums) {
		err = fmt.Errorf("the packages in %s are not those of its %s; remove the directory", packages, sumsFile)
	}
	return err
}

// sumsOf returns the SHA-256 of the packages in a directory.
func sumsOf(packages string) (string, error) {
	all, err := filepath.Glob(filepath.Join(packages, "*.deb"))
	if err != nil {
		return "", err
	}
	var sums strings.Builder
	for _, p := range all {
		data, err := os.ReadFile(p)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(data), filepath.Base(p))
	}
	return sums.String(), nil
}

// download replaces the packages in a directory, with the configuration of apt in dir.
func (debian) download(ctx context.Context, dir, packages string) error {
	fresh := filepath.Join(dir, "downloads")
	if err := errors.Join(os.Mkdir(fresh, 0o755), os.MkdirAll(packages, 0o755)); err != nil {
		return err
	}
	apt := func(args ...string) error {
		return command(ctx, fresh, []string{"APT_CONFIG=" + filepath.Join(dir, "apt.conf")}, "apt-get", append([]string{"-q"}, args...)...)
	}
	if err := apt("update", "--error-on=any"); err != nil {
		return err
	}
	if err := apt(append([]string{"download"}, closure()...)...); err != nil {
		return err
	}
	sums, err := sumsOf(fresh)
	if err == nil && strings.Count(sums, "\n") != len(closure()) {
		err = fmt.Errorf("apt-get downloaded other packages than %d:\n%s", len(closure()), sums)
	}
	if err != nil {
		return err
	}
	old, err := filepath.Glob(filepath.Join(packages, "*.deb"))
	if err != nil {
		return err
	}
	for _, p := range old {
		if err := os.Remove(p); err != nil {
			return err
		}
	}
	if err := os.CopyFS(packages, os.DirFS(fresh)); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(packages, sumsFile), []byte(sums), 0o644)
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

// statusDir has a file for each package, as in images without dpkg that scanners know.
const statusDir = "var/lib/dpkg/status.d"

// layer selects the programs, their libraries, the version of Debian, and every package's copyright and
// status from an unpacked root.
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
	linked = append(linked, "etc/os-release")
	for _, p := range packages {
		linked = append(linked, "usr/share/doc/"+p+"/copyright", statusDir+"/"+p)
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

// The programs to which all names of iptables link, by variant.
const (
	nftProgram    = "xtables-nft-multi"
	legacyProgram = "xtables-legacy-multi"
)

// linked returns the files below a root directory with everything that the dynamic linker loads for
// them, including the linker, under the names that it looks up. A missing library is an error.
func linked(root string, names []string) ([]string, error) {
	found := map[string]bool{}
	for len(names) > 0 {
		name := names[0]
		names = names[1:]
		if found[name] {
			continue
		}
		found[name] = true
		needs, err := needs(filepath.Join(root, name))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		for _, library := range needs {
			at, err := locate(root, library)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			names = append(names, at)
		}
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// needs returns the libraries of an ELF file, and its linker by its path.
func needs(path string) ([]string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	libraries, err := f.ImportedLibraries()
	if err != nil {
		return nil, err
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		text := make([]byte, p.Filesz)
		if _, err := p.ReadAt(text, 0); err != nil {
			return nil, err
		}
		libraries = append(libraries, strings.TrimRight(string(text), "\x00"))
	}
	return libraries, nil
}

// locate finds a library as the linker does without a cache (ld.so(8)): in Debian's directories of
// the architecture first.
func locate(root, library string) (string, error) {
	if filepath.IsAbs(library) {
		name := strings.TrimPrefix(library, "/")
		_, err := os.Stat(filepath.Join(root, name))
		return name, err
	}
	for _, dir := range []string{"lib/*-linux-gnu", "usr/lib/*-linux-gnu", "lib", "usr/lib"} {
		matches, err := filepath.Glob(filepath.Join(root, dir, library))
		if err != nil {
			return "", err
		}
		if len(matches) == 1 {
			return filepath.Rel(root, matches[0])
		}
	}
	return "", fmt.Errorf("library %s is in none of the packages; add the one that has it to the list", library)
}
