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
		"LICENSE": "LICENSE", "README.md": "README.md", "CHANGELOG.md": "CHANGELOG.md", "deploy/systemd/" + unit: "systemd/" + unit,
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
