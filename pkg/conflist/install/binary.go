// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// ErrStopped reports that the context ended before all was done.
var ErrStopped = errors.New("stopped before all was done; run it again")

// Binary is the plugin in the directory from which runtimes run it.
type Binary struct {
	Path    string `json:"path"`
	Version string `json:"version"` // as the plugin reports it
	Wrote   bool   `json:"wrote"`   // or it was there already
}

// Copy copies the plugin to a directory. It writes nothing if the same bytes are there with the right
// mode. The copy is run before it gets its name; after an error the previous plugin is still there.
func Copy(ctx context.Context, source, path string) (b Binary, err error) {
	defer func() {
		if err != nil {
			b, err = Binary{}, fmt.Errorf("install the plugin in %s: %w", policy.Printable(path), err)
		}
	}()
	data, err := readBinary(source)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return b, fmt.Errorf("there is no plugin at %s; name it with --plugin", policy.Printable(source))
	case errors.Is(err, safefile.ErrIrregular):
		return b, fmt.Errorf("%s is not a regular file; name the plugin with --plugin", policy.Printable(source))
	case err != nil:
		return b, err
	}
	dir, err := lockDir(ctx, path)
	if errors.Is(err, fs.ErrNotExist) {
		return b, errors.New("there is no such directory; make it, or name the runtime's with --cni-bin-dir")
	}
	if err != nil {
		return b, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	b.Path = dir.PathOf(config.PluginType)
	present, err := isInstalled(dir, data)
	if err != nil {
		return b, err
	}
	if present {
		b.Version, err = version(ctx, b.Path, policy.Printable(b.Path), installTimeout)
		return b, err
	}
	temp, err := dir.Stage(data, func(file *os.File) error { return file.Chmod(binMode) })
	if err != nil {
		return b, err
	}
	defer func() { err = errors.Join(err, dir.Remove(temp)) }()
	name := "a copy of " + policy.Printable(source) + " there"
	b.Version, err = version(ctx, dir.PathOf(temp), name, installTimeout)
	if err == nil {
		err = dir.Rename(temp, config.PluginType)
	}
	if err != nil {
		return b, err
	}
	b.Wrote = true
	if err := dir.Sync(); err != nil {
		return b, fmt.Errorf("the new plugin is in place: %w", err)
	}
	return b, nil
}

func isInstalled(dir *safefile.Dir, data []byte) (bool, error) {
	present, err := dir.Lstat(config.PluginType)
	path := dir.PathOf(config.PluginType)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	case !present.Mode().IsRegular():
		return false, fmt.Errorf("%s is not a regular file, so ip-masq did not create it; remove it", policy.Printable(path))
	}
	have, err := readBinary(path) // one that cannot be read is replaced
	return err == nil && bytes.Equal(have, data) && present.Mode() == binMode && safefile.IsOwn(present), nil
}

// remove removes the plugin from a directory and returns its path, "" if there was none. A file of its
// name that is not regular was not created by Copy, and stays, with an error.
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

func readBinary(path string) ([]byte, error) {
	const limit = 256 << 20
	data, _, err := safefile.ReadFile(path, limit)
	return data, err
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
	return version(ctx, path, policy.Printable(path), timeout)
}

const installTimeout = 20 * time.Second

// version runs a program without a command: the plugin then prints its name and version. The name of
// the program is for messages.
func version(ctx context.Context, path, name string, timeout time.Duration) (string, error) {
	limit, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c := exec.CommandContext(limit, path)
	c.Env = []string{}        // not the environment of this process
	c.WaitDelay = time.Second // for the output of programs that it left running
	var output limitedOutput
	c.Stdout, c.Stderr = &output, &output
	err := c.Run()
	text := string(bytes.TrimSpace(output.text))
	found := regexp.MustCompile(`^ip-masq (\S{1,64}): `).FindStringSubmatch(text)
	switch {
	case err == nil && found != nil:
		return found[1], nil
	case ctx.Err() != nil:
		return "", ErrStopped
	case limit.Err() != nil:
		err = fmt.Errorf("no answer within %s", timeout)
	case err == nil:
		err = errors.New("it is not the ip-masq plugin")
	}
	return "", fmt.Errorf("run %s: %w; it says %s; name the ip-masq plugin for %s with --plugin", name, err, policy.Quote(text), runtime.GOARCH)
}

// limitedOutput keeps what a program prints up to a limit; then the program is killed by SIGPIPE.
type limitedOutput struct{ text []byte }

func (o *limitedOutput) Write(p []byte) (int, error) {
	const most = 64 << 10 // bytes
	if len(o.text)+len(p) > most {
		return 0, errors.New("it prints too much")
	}
	o.text = append(o.text, p...)
	return len(p), nil
}

// exists does not follow symlinks: in a container their targets may not be mounted.
func exists(root, path string) bool {
	_, err := os.Lstat(filepath.Join(root, path))
	return err == nil
}
