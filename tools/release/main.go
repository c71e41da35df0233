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
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "release: %v\n", err)
		os.Exit(exitCode(err))
	}
}

func exitCode(err error) int {
	if errors.Is(err, errUnknownMaker) {
		return 3
	}
	return 1
}

func run(ctx context.Context, args []string, out, messages io.Writer) error {
	if len(args) == 0 {
		return errors.New("name a command: make, verify or keygen")
	}
	f := flag.NewFlagSet("release "+args[0], flag.ContinueOnError)
	f.SetOutput(messages)
	switch command := args[0]; command {
	case "make":
		r := release{messages: messages}
		var arches string
		f.StringVar(&r.version, "version", "", "`VERSION` to release, such as v0.1.0")
		f.StringVar(&r.root, "root", ".", "`DIR` with the sources")
		f.StringVar(&r.dist, "dist", "dist", "`DIR` to make")
		f.StringVar(&r.key, "key", "", "`FILE` with the key to sign with, as keygen makes it")
		f.StringVar(&r.image, "image", "ghcr.io/ip-masq/ip-masq-cni", "`NAME` of the images")
		f.StringVar(&r.commit, "commit", "", "`HASH` of the commit that the sources are, if git cannot be asked; then SOURCE_DATE_EPOCH has to be set")
		f.StringVar(&r.debs, "debian-packages", "", "`DIR` that keeps the Debian packages of the image with iptables; \"\": do not make that image")
		f.StringVar(&arches, "arch", "amd64,arm64,s390x", "`ARCHITECTURES`, as in GOARCH, with commas between")
		if err := parse(f, args[1:], 0); err != nil {
			return err
		}
		r.arches = strings.Split(arches, ",")
		return r.make(ctx)
	case "verify":
		var v verification
		f.StringVar(&v.publicKey, "public-key", "", "`FILE` with the public key that must have signed the release; \"\": its own, which proves nothing about who made it: exit code 3")
		f.BoolVar(&v.unsigned, "unsigned", false, "without -public-key: accept the release, signed or not")
		if err := parse(f, args[1:], 1); err != nil {
			return err
		}
		v.dir = f.Arg(0)
		report, err := v.verify(ctx)
		if report != "" {
			fmt.Fprintln(out, report)
		}
		if err != nil {
			return fmt.Errorf("verify %s: %w", v.dir, err)
		}
		return nil
	case "keygen":
		if err := parse(f, args[1:], 1); err != nil {
			return err
		}
		return generateKey(f.Arg(0))
	default:
		return fmt.Errorf("there is no command %s; there are make, verify and keygen", command)
	}
}

func parse(f *flag.FlagSet, args []string, operands int) error {
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() != operands {
		f.Usage()
		return fmt.Errorf("got %d arguments %q, want %d", f.NArg(), f.Args(), operands)
	}
	return nil
}
