// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	project = "ip-masq-cni" // also the name of the packages
	source  = "https://github.com/ip-masq/ip-masq-cni"
)

// programs are the shipped programs, by the directory of their source.
func programs() map[string]string {
	return map[string]string{"ip-masq": "plugin", "ip-masq-reconciler": "reconciler"}
}

// release is a release that is being made.
type release struct {
	version, root, dist, key, image, commit, debs string

	arches   []string
	settings []string // where Go gets modules, for the environment
	messages io.Writer
	number   string    // the version without its v
	time     time.Time // of all that has one
	work     string    // a directory for what is packed: ARCH/{ip-masq,ip-masq-reconciler}, man, completions, licenses
	next     string    // the release, until it is complete
}

func (r *release) make(ctx context.Context) (err error) {
	for _, path := range []*string{&r.root, &r.dist, &r.debs, &r.key} {
		if *path == "" {
			continue
		}
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	fromGit := r.commit == ""
	if err := errors.Join(r.setVersion(), empty(r.dist), r.setCommit(ctx), r.setSettings(ctx)); err != nil {
		return err
	}
	if _, err := os.Stat(r.key); r.key != "" && err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(r.dist), 0o755); err != nil {
		return err
	}
	if r.work, err = os.MkdirTemp("", "ip-masq-release-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.work)) }()
	if r.next, err = os.MkdirTemp(filepath.Dir(r.dist), ".dist-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.next)) }()
	if err := errors.Join(os.Chmod(r.next, 0o755), r.checkOut(ctx, fromGit)); err != nil {
		return err
	}
	steps := []func(context.Context) error{
		r.build, r.writeManual, r.writeLicenses, r.packArchives, r.packPackages, r.packChart, r.packImages, r.writeSBOMs, r.sign,
	}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	if err := os.Remove(r.dist); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Rename(r.next, r.dist)
}

// empty fails if there is a directory with files.
func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil
	}
	return errors.Join(err, fmt.Errorf("%s is not empty; remove it, or name another directory with -dist", dir))
}

func (r *release) setVersion() error {
	if !regexp.MustCompile(`^v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.]+)?$`).MatchString(r.version) {
		return fmt.Errorf("-version %q: write one such as v0.1.0 or v0.1.0-rc.1", r.version)
	}
	r.number = r.version[1:]
	return nil
}

// setCommit sets what the sources are, and the time of the release.
func (r *release) setCommit(ctx context.Context) error {
	epoch := os.Getenv("SOURCE_DATE_EPOCH")
	if r.commit == "" {
		changed, err := r.output(ctx, "git", "status", "--porcelain")
		if err != nil {
			return err
		}
		if changed != "" {
			return fmt.Errorf("the sources differ from the commit; commit the changes first:\n%s", changed)
		}
		log, err := r.output(ctx, "git", "log", "-1", "--format=%H %ct")
		if err != nil {
			return err
		}
		r.commit, epoch, _ = strings.Cut(log, " ")
	}
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH=%q: with -commit it has to be the time of the commit, in seconds", epoch)
	}
	r.time = time.Unix(seconds, 0).UTC()
	return nil
}

// checkOut replaces the sources by those of the commit in a directory of their own, without files that git ignores.
func (r *release) checkOut(ctx context.Context, fromGit bool) error {
	if !fromGit {
		return nil
	}
	archive, root := filepath.Join(r.work, "source.tar"), filepath.Join(r.work, "source")
	_, err := r.output(ctx, "git", "-c", "core.autocrlf=false", "archive", "--format=tar", "--output="+archive, r.commit+"^{tree}")
	if err := errors.Join(err, os.Mkdir(root, 0o755)); err != nil {
		return err
	}
	_, err = r.output(ctx, "tar", "-C", root, "-xf", archive)
	r.root = root
	return err
}

// setSettings sets where this machine gets modules. The file of `go env -w` is not read, because it has flags too.
func (r *release) setSettings(ctx context.Context) error {
	names := []string{"GOPROXY", "GOSUMDB", "GOMODCACHE"}
	c := exec.CommandContext(ctx, "go", append([]string{"env"}, names...)...)
	c.Dir = r.root
	out, err := c.Output()
	if err != nil {
		return fmt.Errorf("go env: %w", err)
	}
	for i, value := range strings.Split(strings.TrimSuffix(string(out), "\n"), "\n") {
		r.settings = append(r.settings, names[i]+"="+value)
	}
	return nil
}

// output runs a program in the sources and returns what it prints.
func (r *release) output(ctx context.Context, name string, args ...string) (string, error) {
	return r.outputWith(ctx, nil, name, args...)
}

func (r *release) outputWith(ctx context.Context, env []string, name string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = r.root
	// Settings of this machine must not change the result.
	c.Env = append(os.Environ(), "GOENV=off", "GOFLAGS=", "GOWORK=off", "GOEXPERIMENT=", "GOFIPS140=off", "GOAMD64=v1", "GOARM64=v8.0", "CGO_ENABLED=0", "LC_ALL=C", "TZ=UTC",
		fmt.Sprint("SOURCE_DATE_EPOCH=", r.time.Unix()))
	c.Env = append(append(c.Env, r.settings...), env...)
	out, err := c.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w\n%s", err, exit.Stderr)
		}
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// flags are those of `make build`. The plugin takes its version from package buildversion, the reconciler from main.
func (r *release) flags() []string {
	const plugins = "github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion"
	stamp := fmt.Sprintf("-X main.version=%s -X %s=%s", r.version, plugins, r.version)
	return []string{"-trimpath", "-buildvcs=false", "-ldflags", "-s -w " + stamp}
}

// build builds the programs, as `make build` does.
func (r *release) build(ctx context.Context) error {
	for _, arch := range r.arches {
		for program, dir := range programs() {
			args := append(append([]string{"build"}, r.flags()...), "-o", r.binary(arch, program), "./"+dir)
			if _, err := r.outputWith(ctx, []string{"GOOS=linux", "GOARCH=" + arch}, "go", args...); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *release) binary(arch, program string) string { return filepath.Join(r.work, arch, program) }

// writeManual writes manual pages and completions.
func (r *release) writeManual(ctx context.Context) error {
	args := append(append([]string{"run", "-tags", "man"}, r.flags()...), "./reconciler", r.work)
	_, err := r.outputWith(ctx, []string{"GOOS=" + runtime.GOOS, "GOARCH=" + runtime.GOARCH}, "go", args...)
	return err
}

// writeLicenses writes the licenses of the modules that the programs are linked with, of Go's standard
// library too: all of them ask for that.
func (r *release) writeLicenses(ctx context.Context) error {
	used, err := modules(r.programsOf(r.arches[0])...)
	if err != nil {
		return err
	}
	root, err := r.output(ctx, "go", "env", "GOROOT")
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, m := range used {
		dir := root
		if m.name != stdlib {
			if dir, err = r.output(ctx, "go", "list", "-m", "-f", "{{.Dir}}", m.name); err != nil {
				return err
			}
		}
		files, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil {
			return err
		}
		found := false
		for _, file := range files {
			if !regexp.MustCompile(`^(?i:licen[cs]e|notice|copying|patents)`).MatchString(filepath.Base(file)) {
				continue
			}
			license, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			found = true
			fmt.Fprintf(&text, "%s %s: %s\n\n%s\n\n%s\n\n", m.name, m.version, filepath.Base(file), strings.TrimSpace(string(license)), strings.Repeat("-", 72))
		}
		if !found {
			return fmt.Errorf("the module %s has no license in %s", m.name, dir)
		}
	}
	return os.WriteFile(filepath.Join(r.work, "licenses"), []byte(text.String()), 0o644)
}

// programsOf returns the paths of the programs for an architecture.
func (r *release) programsOf(arch string) []string {
	var all []string
	for program := range programs() {
		all = append(all, r.binary(arch, program))
	}
	slices.Sort(all)
	return all
}

// packImages packs the images for all architectures, without and with iptables.
func (r *release) packImages(ctx context.Context) error {
	for _, iptables := range []bool{false, true} {
		args := []string{
			"run", "-trimpath", "-buildvcs=false", "./deploy/image", "-version", r.version, "-arch", strings.Join(r.arches, ","),
			"-binaries", r.work, "-license", filepath.Join(r.root, "LICENSE"), "-name", r.imageName(iptables), "-out", filepath.Join(r.next, r.imageFile(iptables)),
		}
		if iptables {
			if r.debs == "" {
				return nil
			}
			args = append(args, "-iptables", "-debian-packages", r.debs)
		}
		if _, err := r.output(ctx, "go", args...); err != nil {
			return err
		}
	}
	info, err := os.Stat(filepath.Join(r.debs, r.arches[0], sumsFile))
	if err != nil {
		return err
	}
	if days := int(time.Since(info.ModTime()).Hours() / 24); days > 30 {
		fmt.Fprintf(r.messages, "release: the Debian packages of the image with iptables are of %d days ago; remove %s for security updates\n", days, r.debs)
	}
	return nil
}

// suffix is that of the name of an image.
func suffix(iptables bool) string {
	if iptables {
		return "-iptables"
	}
	return ""
}

func (r *release) imageName(iptables bool) string {
	return r.image + ":" + r.version + suffix(iptables)
}

func (r *release) imageFile(iptables bool) string {
	return fmt.Sprintf("%s_%s_image%s.tar", project, r.number, suffix(iptables))
}

// Files of a release beside the artefacts.
const (
	sumsFile      = "SHA256SUMS"
	publicKeyFile = "ip-masq.pub" // for minisign
)

// sign writes the sums of all files, and with a key their signature, by minisign(1).
func (r *release) sign(ctx context.Context) error {
	if r.key == "" {
		fmt.Fprintln(r.messages, "release: WARNING: without a key nothing is signed; this is no release to publish. `minisign -G -W` makes a key.")
		return r.writeSums()
	}
	if _, err := r.output(ctx, "minisign", "-R", "-s", r.key, "-p", filepath.Join(r.next, publicKeyFile)); err != nil {
		return err
	}
	if err := r.writeSums(); err != nil {
		return err
	}
	_, err := r.output(ctx, "minisign", "-S", "-s", r.key, "-m", filepath.Join(r.next, sumsFile),
		"-c", "signature of "+sumsFile+": minisign -V -p "+publicKeyFile+" -m "+sumsFile, "-t", fmt.Sprintf("%s %s commit %s", project, r.version, r.commit))
	return err
}

// writeSums writes what `sha256sum *` prints.
func (r *release) writeSums() error {
	entries, err := os.ReadDir(r.next)
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, entry := range entries {
		data, err := os.ReadFile(filepath.Join(r.next, entry.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&text, "%s  %s\n", sumOf(data), entry.Name())
	}
	return r.write(sumsFile, []byte(text.String()))
}
