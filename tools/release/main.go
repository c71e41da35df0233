// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "release: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, messages io.Writer) error {
	r := release{messages: messages}
	var arches string
	f := flag.NewFlagSet("release", flag.ContinueOnError)
	f.SetOutput(messages)
	f.StringVar(&r.version, "version", "", "`VERSION` to release, such as v0.1.0")
	f.StringVar(&r.root, "root", ".", "`DIR` with the sources")
	f.StringVar(&r.dist, "dist", "dist", "`DIR` to make")
	f.StringVar(&r.key, "key", "", "`FILE` with the key to sign with, as `minisign -G -W` makes it")
	f.StringVar(&r.image, "image", "ghcr.io/ip-masq/ip-masq-cni", "`NAME` of the images")
	f.StringVar(&r.commit, "commit", "", "`HASH` of the commit that the sources are, if git cannot be asked; then SOURCE_DATE_EPOCH has to be set")
	f.StringVar(&r.debs, "debian-packages", "", "`DIR` that keeps the Debian packages of the image with iptables; \"\": do not make that image")
	f.StringVar(&arches, "arch", "amd64,arm64,s390x", "`ARCHITECTURES`, as in GOARCH, with commas between")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() > 0 {
		f.Usage()
		return fmt.Errorf("got the arguments %q, want none", f.Args())
	}
	r.arches = strings.Split(arches, ",")
	return r.make(ctx)
}
