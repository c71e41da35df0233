// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// ErrStopped says that the context ended before all was done.
var ErrStopped = errors.New("stopped before all was done; run it again")

// Binary is the plugin in the directory from which runtimes run it.
type Binary struct {
	Path    string `json:"path"`
	Version string `json:"version"` // as the plugin reports it
	Wrote   bool   `json:"wrote"`   // or it was there already
}

// Copy copies the plugin to a directory. It writes nothing if the same bytes are there with the right
// mode. The copy is run before it gets its name; after an error the previous plugin is still there.
func Copy(ctx context.Context, source, dir string) (Binary, error) {
	c := &copying{source: source, path: dir}
	if err := c.run(ctx, c.steps()); err != nil {
		return Binary{}, fmt.Errorf("install the plugin in %s: %w", policy.Printable(dir), err)
	}
	return c.binary, nil
}

// copying is a Copy in progress. Its steps run one after the other, and the process may be killed
// between any two.
type copying struct {
	source, path string

	data   []byte
	dir    *safefile.Dir
	temp   string
	binary Binary
	done   bool
}

func (c *copying) steps() []func(context.Context) error {
	return []func(context.Context) error{c.compare, c.stage, c.try, c.rename, c.sync}
}

func (c *copying) run(ctx context.Context, steps []func(context.Context) error) (err error) {
	for i := 0; i < len(steps) && err == nil && !c.done; i++ {
		err = steps[i](ctx)
	}
	if c.dir == nil {
		return err
	}
	if c.temp != "" {
		err = errors.Join(err, c.dir.Remove(c.temp))
	}
	return errors.Join(err, c.dir.Close())
}

// compare reads the plugin and what is there. A symlink, or anything else that is not a file, was put
// there by another program, and is not replaced.
func (c *copying) compare(ctx context.Context) (err error) {
	c.data, _, err = readBinary(c.source)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("there is no plugin at %s; name it with --plugin", policy.Printable(c.source))
	case errors.Is(err, safefile.ErrIrregular):
		return fmt.Errorf("%s is not a regular file; name the plugin with --plugin", policy.Printable(c.source))
	case err != nil:
		return err
	}
	c.dir, err = lockDir(ctx, c.path)
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("there is no such directory; make it, or name the runtime's with --cni-bin-dir")
	}
	if err != nil {
		return err
	}
	c.binary.Path = c.dir.PathOf(config.PluginType)
	present, err := c.dir.Lstat(config.PluginType)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	path := policy.Printable(c.binary.Path)
	isLink := present.Mode()&fs.ModeSymlink != 0
	if !isLink && !present.Mode().IsRegular() {
		return fmt.Errorf("%s is there and is not a file; remove it", path)
	}
	data, info, err := readBinary(c.binary.Path)
	same := err == nil && bytes.Equal(data, c.data)
	switch {
	case isLink && !same:
		return fmt.Errorf("%s is a symlink to another program, which ip-masq did not create; remove the link, or keep it and use that program", path)
	case !same || !isLink && (info.Mode() != binMode || !isOwn(info)):
		return nil // it is replaced, even if it cannot be read
	}
	c.done = true
	c.binary.Version, err = program{c.binary.Path, path, installTimeout}.check(ctx)
	return err
}

func (c *copying) stage(context.Context) (err error) {
	c.temp, err = c.dir.Stage(c.data, func(file *os.File) error { return file.Chmod(binMode) })
	return err
}

func (c *copying) try(ctx context.Context) (err error) {
	p := program{c.dir.PathOf(c.temp), "a copy of " + policy.Printable(c.source) + " there", installTimeout}
	c.binary.Version, err = p.check(ctx)
	return err
}

func (c *copying) rename(context.Context) error {
	err := c.dir.Rename(c.temp, config.PluginType)
	if err == nil {
		c.temp, c.binary.Wrote = "", true
	}
	return err
}

func (c *copying) sync(context.Context) error {
	if err := c.dir.Sync(); err != nil {
		return fmt.Errorf("the new plugin is in place: %w", err)
	}
	return nil
}

// remove removes the plugin from a directory and returns its path, "" if there was none. A file of its
// name that is not regular was not put there by Copy, and stays, with an error.
func remove(ctx context.Context, dir string) (path string, err error) {
	d, err := lockDir(ctx, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	info, err := d.Lstat(config.PluginType)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case err != nil:
		return "", err
	case !info.Mode().IsRegular():
		return "", fmt.Errorf("%s stays: it is not a regular file, so ip-masq did not create it; remove it if no other program needs it",
			policy.Printable(d.PathOf(config.PluginType)))
	}
	if err := d.Remove(config.PluginType); err != nil {
		return "", err
	}
	return d.PathOf(config.PluginType), d.Sync()
}

// binMode is the mode of the binary, whatever the umask.
const binMode = 0o755

func readBinary(path string) ([]byte, fs.FileInfo, error) {
	const limit = 256 << 20
	return safefile.ReadFile(path, limit)
}

// isOwn reports whether a file belongs to this process's user.
func isOwn(info fs.FileInfo) bool {
	s, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(s.Uid) == os.Geteuid()
}

// lockDir locks a plugin directory: another process of ip-masq may copy a binary there and run it.
func lockDir(ctx context.Context, path string) (*safefile.Dir, error) {
	const timeout = 30 * time.Second
	d, err := safefile.OpenLocked(ctx, path, timeout)
	if err != nil && ctx.Err() != nil {
		return nil, ErrStopped
	}
	return d, err
}

// Version returns the version that an installed plugin reports.
func Version(ctx context.Context, path string) (string, error) {
	const timeout = 2 * time.Second
	return program{path, policy.Printable(path), timeout}.version(ctx)
}

const installTimeout = 20 * time.Second

// program is a program that should be the plugin.
type program struct {
	path, name string        // the name is for messages
	timeout    time.Duration // of each call
}

// check returns the version of the plugin, or why it is not the plugin or does not speak the
// versions of CNI that conflists may have.
func (p program) check(ctx context.Context) (string, error) {
	answer, err := p.call(ctx, "CNI_COMMAND=VERSION")
	if err != nil {
		return "", err
	}
	info, err := (&version.PluginDecoder{}).Decode(answer)
	if err != nil {
		return "", fmt.Errorf("run %s for its VERSION: it answered %s, which no CNI plugin says; name the ip-masq plugin with --plugin",
			p.name, policy.Quote(string(answer)))
	}
	for _, v := range version.All.SupportedVersions() {
		if !slices.Contains(info.SupportedVersions(), v) {
			return "", fmt.Errorf("run %s for its VERSION: it speaks CNI %s, and not %s, which conflists may have; take the plugin of this release",
				p.name, policy.Quote(strings.Join(info.SupportedVersions(), ", ")), v)
		}
	}
	return p.version(ctx)
}

// version runs the program without a command: the plugin then prints its name and version.
func (p program) version(ctx context.Context) (string, error) {
	about, err := p.call(ctx)
	if err != nil {
		return "", err
	}
	found := regexp.MustCompile(`^ip-masq (\S{1,64}): `).FindSubmatch(about)
	if found == nil {
		return "", fmt.Errorf("run %s: it says %s, so it is another plugin; name the ip-masq plugin with --plugin", p.name, policy.Quote(string(about)))
	}
	return string(found[1]), nil
}

// call runs the program and returns its output and errors. Processes that it started end with it.
func (p program) call(ctx context.Context, env ...string) ([]byte, error) {
	const other = "so it is not the ip-masq plugin; name that with --plugin"
	limit, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	output := &limitedBuffer{left: maxOutput}
	c := exec.CommandContext(limit, p.path)
	c.Env = append([]string{}, env...) // not the environment of this process
	c.Stdin = strings.NewReader(`{"cniVersion": "1.0.0"}`)
	c.Stdout, c.Stderr = output, output
	c.WaitDelay = time.Second
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return unix.Kill(-c.Process.Pid, unix.SIGKILL) }
	err := c.Run()
	if err != nil && c.Process != nil {
		_ = c.Cancel() // mostly there is no process left
	}
	text := bytes.TrimSpace(output.text.Bytes())
	var exit *exec.ExitError
	switch {
	case err == nil:
		return text, nil
	case ctx.Err() != nil:
		return nil, ErrStopped
	case errors.Is(err, exec.ErrWaitDelay):
		err = fmt.Errorf("it left something running, %s", other)
	case limit.Err() != nil:
		err = fmt.Errorf("no answer within %s, %s", p.timeout, other)
	case output.left < 0:
		err = fmt.Errorf("it says more than %d KiB, %s", maxOutput>>10, other)
	case errors.Is(err, unix.ENOEXEC):
		err = fmt.Errorf("%w: it is no program for this node, which is %s; take the plugin for that", unix.ENOEXEC, runtime.GOARCH)
	case errors.Is(err, unix.EACCES):
		err = fmt.Errorf("%w: the directory does not let programs run; mount it without noexec, or name another with --cni-bin-dir", unix.EACCES)
	case errors.Is(err, unix.ENOENT):
		err = fmt.Errorf("%w: it needs a loader that the node does not have; take the plugin of a release, which is static", unix.ENOENT)
	case errors.As(err, &exit):
		err = fmt.Errorf("%w, saying %s; name the ip-masq plugin with --plugin", exit, policy.Quote(string(text)))
	}
	return nil, fmt.Errorf("run %s: %w", p.name, err)
}

const maxOutput = 64 << 10 // bytes

// limitedBuffer keeps what is written to it until it is full. Its error then ends the writer, by a
// closed pipe.
type limitedBuffer struct {
	text bytes.Buffer
	left int // below 0 once it was too little
}

// Write implements io.Writer.
func (l *limitedBuffer) Write(p []byte) (int, error) {
	if l.left -= len(p); l.left < 0 {
		return 0, io.ErrShortWrite
	}
	return l.text.Write(p)
}

// exists does not follow symlinks: in a container their targets may not be mounted.
func exists(root, path string) bool {
	_, err := os.Lstat(filepath.Join(root, path))
	return err == nil
}
