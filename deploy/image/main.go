// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "image: %v\n", err)
		os.Exit(1)
	}
}

// options say what to pack.
type options struct {
	name, version, binaries, license, out string
	arches                                []string
	iptables                              bool
	debian                                debian
}

func run(ctx context.Context, args []string, usage io.Writer) error {
	o := options{}
	var arches string
	f := flag.NewFlagSet("image", flag.ContinueOnError)
	f.SetOutput(usage)
	f.StringVar(&o.name, "name", "ghcr.io/ip-masq/ip-masq-cni:dev", "`NAME` of the image, with its tag")
	f.StringVar(&o.version, "version", "dev", "`VERSION` that its label tells")
	f.StringVar(&o.binaries, "binaries", "bin/image", "`DIR` that has, for each architecture, a directory with ip-masq and ip-masq-reconciler")
	f.StringVar(&o.license, "license", "LICENSE", "`FILE` with the license of the binaries")
	f.StringVar(&arches, "arch", "amd64,arm64,s390x", "`ARCHITECTURES`, as in GOARCH, with commas between")
	f.StringVar(&o.out, "out", "", "`FILE` to write")
	f.BoolVar(&o.iptables, "iptables", false, "add iptables, in both variants (needs apt-get, dpkg-deb and Debian's keyring)")
	f.StringVar(&o.debian.mirror, "debian-mirror", "http://deb.debian.org", "`URL` with debian and debian-security below it")
	f.StringVar(&o.debian.suite, "debian-suite", "bookworm", "Debian `RELEASE` of the packages")
	f.StringVar(&o.debian.packages, "debian-packages", "", "`DIR` that keeps the packages, to pack the same again without a network; remove it for newer ones")
	if err := f.Parse(args); err != nil {
		return err
	}
	if o.out == "" || f.NArg() > 0 {
		f.Usage()
		return errors.New("name the file to write with --out, and nothing else")
	}
	o.arches = strings.Split(arches, ",")
	return o.pack(ctx)
}

// pack writes the archive atomically.
func (o options) pack(ctx context.Context) error {
	images := make([]oci.Image, len(o.arches))
	for i, arch := range o.arches {
		var err error
		if images[i], err = o.image(ctx, arch); err != nil {
			return fmt.Errorf("make image for %s: %w", arch, err)
		}
	}
	var archive bytes.Buffer
	if err := oci.Write(&archive, images...); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(o.out), "."+filepath.Base(o.out)+"-")
	if err != nil {
		return err
	}
	_, err = f.Write(archive.Bytes())
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), o.out)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// image returns the image for one architecture, with the files that change most often in its last
// layer.
func (o options) image(ctx context.Context, arch string) (oci.Image, error) {
	image := oci.Image{
		Name: o.name, Arch: arch,
		Entrypoint: []string{"/ip-masq-reconciler", "--agent-config-dir=/etc/config"},
		Env:        []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin:/"},
		WorkingDir: "/",
		Labels: map[string]string{
			"org.opencontainers.image.title":       "ip-masq",
			"org.opencontainers.image.description": "Masquerades what pods send outside: a chained CNI plugin and its reconciler",
			"org.opencontainers.image.source":      "https://github.com/ip-masq/ip-masq-cni",
			"org.opencontainers.image.version":     o.version,
			"org.opencontainers.image.licenses":    "Apache-2.0",
		},
	}
	if o.iptables {
		image.Labels["org.opencontainers.image.licenses"] = "Apache-2.0 AND GPL-2.0-or-later AND LGPL-2.1-or-later"
		layer, err := o.debian.iptables(ctx, arch)
		if err != nil {
			return oci.Image{}, err
		}
		image.Layers = append(image.Layers, layer)
	}
	var ours []oci.File
	for name, path := range map[string]string{
		"ip-masq":            filepath.Join(o.binaries, arch, "ip-masq"),
		"ip-masq-reconciler": filepath.Join(o.binaries, arch, "ip-masq-reconciler"),
		"LICENSE":            o.license,
	} {
		data, err := os.ReadFile(path)
		if err != nil {
			return oci.Image{}, fmt.Errorf("%w; `make image` builds what it needs", err)
		}
		file := oci.File{Name: name, Mode: 0o755, Data: data}
		if name == "LICENSE" {
			file.Mode = 0o644
		}
		ours = append(ours, file)
	}
	image.Layers = append(image.Layers, ours)
	return image, nil
}
