// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb" // the packager "deb"
	_ "github.com/goreleaser/nfpm/v2/rpm" // the packager "rpm"
)

// file is a file of an archive or package.
type file struct {
	name string // the path, without a leading slash
	mode fs.FileMode
	data []byte
}

// tarGz returns a tar.gz of files, owned by root, in the order of their names.
func (r *release) tarGz(files []file) ([]byte, error) {
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.name, b.name) })
	var out bytes.Buffer
	zip, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	archive := tar.NewWriter(zip)
	for _, f := range files {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: int64(f.mode.Perm()), Size: int64(len(f.data)), ModTime: r.time, Format: tar.FormatUSTAR}
		if err := archive.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := archive.Write(f.data); err != nil {
			return nil, err
		}
	}
	err = errors.Join(archive.Close(), zip.Close())
	return out.Bytes(), err
}

// read returns a file with another name.
func read(source, name string, mode fs.FileMode) (file, error) {
	data, err := os.ReadFile(source)
	return file{name: name, mode: mode, data: data}, err
}

// below returns the files below a directory, with names below another one. Each has mode 0644.
func below(dir, name string) ([]file, error) {
	var files []file
	err := filepath.WalkDir(dir, func(source string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if !d.Type().IsRegular() {
			return fmt.Errorf("%s is not a regular file", source)
		}
		relative, err := filepath.Rel(dir, source)
		if err != nil {
			return err
		}
		f, err := read(source, path.Join(name, filepath.ToSlash(relative)), 0o644)
		files = append(files, f)
		return err
	})
	return files, err
}

// common returns what an archive and a package of an architecture have, with names as in the archive.
func (r *release) common(arch string) ([]file, error) {
	var files []file
	var errs []error
	add := func(f file, err error) { files, errs = append(files, f), append(errs, err) }
	for program := range programs() {
		add(read(r.binary(arch, program), program, 0o755))
	}
	for source, name := range map[string]string{
		"LICENSE": "LICENSE", "README.md": "README.md", "CHANGELOG.md": "CHANGELOG.md",
		"deploy/systemd/ip-masq-boot.service":       "systemd/ip-masq-boot.service",
		"deploy/systemd/ip-masq-reconciler.service": "systemd/ip-masq-reconciler.service",
	} {
		add(read(filepath.Join(r.root, source), name, 0o644))
	}
	add(read(filepath.Join(r.work, "licenses"), "THIRD-PARTY-LICENSES", 0o644))
	for source, name := range map[string]string{
		filepath.Join(r.work, "man"): "man", filepath.Join(r.work, "completions"): "completions",
	} {
		some, err := below(source, name)
		files, errs = append(files, some...), append(errs, err)
	}
	examples, err := below(filepath.Join(r.root, "conflist-examples"), "conflist-examples")
	for _, f := range examples {
		if !strings.HasSuffix(f.name, ".go") && !strings.Contains(f.name, "/testdata/") {
			files = append(files, f)
		}
	}
	return files, errors.Join(append(errs, err)...)
}

// packArchives writes a tar.gz for each architecture.
func (r *release) packArchives(context.Context) error {
	for _, arch := range r.arches {
		files, err := r.common(arch)
		if err != nil {
			return err
		}
		name := fmt.Sprintf("%s_%s_linux_%s", project, r.number, arch)
		for i := range files {
			files[i].name = name + "/" + files[i].name
		}
		data, err := r.tarGz(files)
		if err != nil {
			return err
		}
		if err := r.write(name+".tar.gz", data); err != nil {
			return err
		}
	}
	return nil
}

func (r *release) write(name string, data []byte) error {
	return os.WriteFile(filepath.Join(r.next, name), data, 0o644)
}

// packChart packs the chart as `helm package` does, with the version of the release.
func (r *release) packChart(context.Context) error {
	const name = "ip-masq"
	files, err := below(filepath.Join(r.root, "deploy", "chart"), name)
	if err != nil {
		return fmt.Errorf("pack the chart: %w", err)
	}
	for i, f := range files {
		if f.name != name+"/Chart.yaml" {
			continue
		}
		for key, version := range map[string]string{"version": r.number, "appVersion": r.version} {
			line := regexp.MustCompile(`(?m)^` + key + `: .*$`)
			if !line.Match(f.data) {
				return fmt.Errorf("pack the chart: Chart.yaml has no %s", key)
			}
			files[i].data = line.ReplaceAll(files[i].data, []byte(key+": "+version))
		}
		images := regexp.MustCompile(`(/ip-masq-cni:)v[0-9.]+`) // of an annotation
		files[i].data = images.ReplaceAll(files[i].data, []byte("${1}"+r.version))
	}
	data, err := r.tarGz(files)
	if err != nil {
		return err
	}
	return r.write(name+"-"+r.number+".tgz", data)
}

// packaged has nfpm.yaml, which says what a package is, the configuration and the scripts.
const packaged = "tools/release/package"

// packPackages writes a .deb and an .rpm for each architecture.
func (r *release) packPackages(context.Context) error {
	for _, arch := range r.arches {
		files := filepath.Join(r.work, "package", arch)
		env := map[string]string{"ARCH": arch, "VERSION": r.version, "FILES": files}
		config, err := nfpm.ParseFileWithEnvMapping(filepath.Join(r.root, packaged, "nfpm.yaml"), func(name string) string { return env[name] })
		if err != nil {
			return err
		}
		if err := r.stage(arch, files, config.Maintainer); err != nil {
			return err
		}
		for _, format := range []string{"deb", "rpm"} {
			if err := r.packPackage(config, format); err != nil {
				return fmt.Errorf("pack the %s for %s: %w", format, arch, err)
			}
		}
	}
	return nil
}

func (r *release) packPackage(config nfpm.Config, format string) error {
	info, err := config.Get(format)
	if err != nil {
		return err
	}
	info.MTime = r.time
	for _, script := range []*string{&info.Scripts.PostInstall, &info.Scripts.PreRemove, &info.Scripts.PostRemove} {
		*script = filepath.Join(r.root, packaged, *script)
	}
	if format == "deb" {
		info.License = "" // in the copyright file
	}
	packager, err := nfpm.Get(format)
	if err != nil {
		return err
	}
	info.Target = filepath.Join(r.next, packager.ConventionalFileName(info))
	var out bytes.Buffer
	if err := packager.Package(info, &out); err != nil {
		return err
	}
	return os.WriteFile(info.Target, out.Bytes(), 0o644)
}

// stage writes the files of the packages to a directory: those of the archive, as packages have them, and
// further ones.
func (r *release) stage(arch, dir, maintainer string) error {
	all, err := r.common(arch)
	conf, confErr := below(filepath.Join(r.root, packaged, "conf"), "conf")
	copyright, copyrightErr := read(filepath.Join(r.root, packaged, "deb", "copyright"), "deb/copyright", 0o644)
	if err := errors.Join(err, confErr, copyrightErr); err != nil {
		return err
	}
	changelog := fmt.Appendf(nil, "%s (%s-1) stable; urgency=medium\n\n  * Release %s: see changelog.gz.\n\n -- %s  %s\n",
		project, strings.Replace(r.number, "-", "~", 1), r.version, maintainer, r.time.Format("Mon, 02 Jan 2006 15:04:05 -0700"))
	for _, f := range append(append(all, conf...), copyright, file{name: "deb/changelog.Debian", mode: 0o644, data: changelog}) {
		switch {
		case f.name == "README.md":
			f.name = "doc/README.md"
		case f.name == "CHANGELOG.md":
			f.name = "doc/changelog.gz"
		case f.name == "THIRD-PARTY-LICENSES":
			f.name = "doc/THIRD-PARTY-LICENSES.gz"
		case strings.HasPrefix(f.name, "man/") || f.name == "deb/changelog.Debian":
			f.name += ".gz"
		case strings.HasPrefix(f.name, "systemd/"):
			f.data = bytes.ReplaceAll(f.data, []byte("/usr/local/bin"), []byte("/usr/sbin"))
		}
		if strings.HasSuffix(f.name, ".gz") {
			if f.data, err = compress(f.data); err != nil {
				return err
			}
		}
		path := filepath.Join(dir, f.name)
		// The second mode is not subject to the umask.
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, f.data, f.mode), os.Chmod(path, f.mode)); err != nil {
			return err
		}
	}
	return nil
}

// compress returns a gzip without name and time.
func compress(data []byte) ([]byte, error) {
	var out bytes.Buffer
	w, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	_, err = w.Write(data)
	err = errors.Join(err, w.Close())
	return out.Bytes(), err
}
