// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb" // the packager "deb"
	"github.com/goreleaser/nfpm/v2/files"
	_ "github.com/goreleaser/nfpm/v2/rpm" // the packager "rpm"
)

const (
	// What packages have beside the programs: the configuration below /etc/ip-masq, and the scripts.
	packaged = "tools/release/package"

	confDir    = "etc/ip-masq"
	maintainer = "ip-masq maintainers <ip-masq-cni@users.noreply.github.com>"
	summary    = "CNI plugin that masquerades the traffic of pods"
	about      = `A chained CNI plugin ensures the masquerade rules of a node before a pod
starts: traffic to networks that can route the addresses of pods keeps its
source address, all other traffic gets the address of the node. A service
repairs the rules when other programs change them. It does the job of
ip-masq-agent.

After the installation ip-masq-reconciler install copies the plugin to the
directory of the container runtime, and inserts it into its configuration.`
)

// packPackages writes a .deb and an .rpm for each architecture.
func (r *release) packPackages(context.Context) error {
	for _, arch := range r.arches {
		for _, format := range []string{"deb", "rpm"} {
			if err := r.packPackage(arch, format); err != nil {
				return fmt.Errorf("pack the %s for %s: %w", format, arch, err)
			}
		}
	}
	return nil
}

func (r *release) packPackage(arch, format string) error {
	all, err := r.packageFiles(arch, format)
	if err != nil {
		return err
	}
	// nfpm reads files by their path.
	dir := filepath.Join(r.work, "package", arch, format)
	info := &nfpm.Info{
		Name: project, Arch: arch, Platform: "linux", Version: r.version, Release: "1", Section: "net", Priority: "optional",
		Maintainer: maintainer, Vendor: "ip-masq", Description: summary + "\n" + about, Homepage: source, License: "Apache-2.0",
		MTime: r.time, DisableGlobbing: true,
		Overridables: nfpm.Overridables{
			Umask: 0o022,
			RPM:   nfpm.RPM{BuildHost: "localhost", Summary: summary},
		},
	}
	if format == "deb" {
		info.Suggests = []string{"iptables", "nftables"}
		info.License = "" // in the copyright file
	}
	for _, f := range all {
		source := filepath.Join(dir, f.name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(source), 0o755), os.WriteFile(source, f.data, f.mode)); err != nil {
			return err
		}
		c := &files.Content{
			Source: source, Destination: "/" + f.name,
			FileInfo: &files.ContentFileInfo{Owner: "root", Group: "root", Mode: f.mode, MTime: r.time},
		}
		if f.conf {
			c.Type = files.TypeConfigNoReplace
		}
		info.Contents = append(info.Contents, c)
	}
	for script, to := range map[string]*string{
		"preinstall": &info.Scripts.PreInstall, "postinstall": &info.Scripts.PostInstall,
		"preremove": &info.Scripts.PreRemove, "postremove": &info.Scripts.PostRemove,
	} {
		text, err := os.ReadFile(filepath.Join(r.root, packaged, format, script))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		*to = filepath.Join(dir, script)
		if err := errors.Join(err, os.WriteFile(*to, text, 0o755)); err != nil {
			return err
		}
	}
	info = nfpm.WithDefaults(info)
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

// packageFiles returns the files of a package, below the root of a machine.
func (r *release) packageFiles(arch, format string) ([]file, error) {
	all, err := r.common(arch)
	if err != nil {
		return nil, err
	}
	const doc = "usr/share/doc/" + project
	units, zsh := "lib/systemd/system", "usr/share/zsh/vendor-completions"
	if format == "rpm" {
		units, zsh = "usr/lib/systemd/system", "usr/share/zsh/site-functions"
	}
	var kept []file
	for _, f := range all {
		dir, base := path.Split(f.name)
		switch dir {
		case "":
			switch _, isProgram := programs()[base]; {
			case isProgram:
				f.name = "usr/sbin/" + base
			case base == "LICENSE" && format == "deb":
				f.name, f.data = doc+"/copyright", []byte(copyright)
			case base == "CHANGELOG.md" || base == "THIRD-PARTY-LICENSES":
				f.name = strings.Replace(base, "CHANGELOG.md", "changelog", 1) + ".gz"
				if f.data, err = compress(f.data); err != nil {
					return nil, err
				}
				fallthrough
			default:
				f.name = doc + "/" + f.name
			}
		case "systemd/":
			f.name = units + "/" + base
			f.data = bytes.ReplaceAll(f.data, []byte("/usr/local/bin/"), []byte("/usr/sbin/"))
		case "man/":
			f.name = "usr/share/man/man8/" + base + ".gz"
			if f.data, err = compress(f.data); err != nil {
				return nil, err
			}
		case "completions/bash/":
			f.name = "usr/share/bash-completion/completions/" + base
		case "completions/zsh/":
			f.name = zsh + "/" + base
		case "completions/fish/":
			f.name = "usr/share/fish/vendor_completions.d/" + base
		default:
			f.name = doc + "/" + f.name
		}
		kept = append(kept, f)
	}
	conf, err := below(filepath.Join(r.root, packaged, "conf"), confDir)
	if err != nil {
		return nil, err
	}
	for _, f := range conf {
		f.conf = true
		kept = append(kept, f)
	}
	if format == "deb" {
		changelog, err := compress(fmt.Appendf(nil, "%s (%s-1) stable; urgency=medium\n\n  * Release %s: see changelog.gz.\n\n -- %s  %s\n",
			project, strings.Replace(r.number, "-", "~", 1), r.version, maintainer, r.time.Format("Mon, 02 Jan 2006 15:04:05 -0700")))
		if err != nil {
			return nil, err
		}
		kept = append(kept, file{name: doc + "/changelog.Debian.gz", mode: 0o644, data: changelog})
	}
	return kept, nil
}

const copyright = `Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: ip-masq-cni
Source: ` + source + `
Comment: The programs are linked with the modules of THIRD-PARTY-LICENSES.gz.

Files: *
Copyright: 2026 The ip-masq authors
License: Apache-2.0
 On Debian systems, the full text of the Apache License, Version 2.0, is in
 /usr/share/common-licenses/Apache-2.0.
`

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
