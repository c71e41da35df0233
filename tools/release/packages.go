// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb" // the packager "deb"
	_ "github.com/goreleaser/nfpm/v2/rpm" // the packager "rpm"
)

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
			f.data = bytes.ReplaceAll(f.data, []byte("/usr/local/bin/"), []byte("/usr/sbin/"))
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
