// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Binary is the plugin in the directory from which runtimes run it.
type Binary struct {
	Path    string
	Version string // as it says itself
	Wrote   bool   // or it was there already
}

// Put copies the plugin to the directory. Where the same bytes with the right
// mode are there already it writes nothing. The copy is run before it gets its
// name: after an error, whatever was there before is there still.
func Put(ctx context.Context, source, dir string) (Binary, error) {
	p := &placement{source: source, dir: dir}
	if err := p.run(ctx, p.steps()); err != nil {
		return Binary{}, fmt.Errorf("install the plugin in %s: %w", policy.Printable(dir), err)
	}
	return p.binary, nil
}

// placement is a Put under way. Its steps come in turn, and a process may be
// killed between any two.
type placement struct {
	source, dir string

	data   []byte
	folder *safefile.Dir
	temp   string
	binary Binary
	done   bool
}

func (p *placement) steps() []func(context.Context) error {
	return []func(context.Context) error{p.read, p.lock, p.compare, p.stage, p.try, p.rename, p.sync}
}

func (p *placement) run(ctx context.Context, steps []func(context.Context) error) error {
	var err error
	for _, step := range steps {
		if err = step(ctx); err != nil || p.done {
			break
		}
	}
	if p.folder == nil {
		return err
	}
	if p.temp != "" {
		err = errors.Join(err, p.folder.Remove(p.temp))
	}
	return errors.Join(err, p.folder.Close())
}

func (p *placement) read(context.Context) error {
	data, _, err := readBinary(p.source)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("there is no plugin at %s; name it with --plugin", policy.Printable(p.source))
	case errors.Is(err, safefile.ErrIrregular):
		return fmt.Errorf("%s is not a regular file; name the plugin with --plugin", policy.Printable(p.source))
	}
	p.data = data
	return err
}

func (p *placement) lock(ctx context.Context) error {
	folder, err := openFolder(ctx, p.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("there is no such directory; make it, or name the runtime's with --cni-bin-dir")
	}
	p.folder = folder
	return err
}

// compare looks at what is there. A symlink, or anything that is no file, is
// somebody else's doing, and replacing it would undo it.
func (p *placement) compare(ctx context.Context) error {
	p.binary.Path = filepath.Join(p.dir, config.PluginType)
	present, err := os.Lstat(p.binary.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return safefile.Error("look at", p.binary.Path, err)
	}
	isLink := present.Mode()&fs.ModeSymlink != 0
	if !isLink && !present.Mode().IsRegular() {
		return fmt.Errorf("%s is there and is not a file; remove it", policy.Printable(p.binary.Path))
	}
	data, info, err := readBinary(p.binary.Path)
	same := err == nil && bytes.Equal(data, p.data)
	switch {
	case isLink && !same:
		return fmt.Errorf("%s is a symlink to another program, which somebody else put there; remove the link, or let it be and use theirs",
			policy.Printable(p.binary.Path))
	case !same || !isLink && (info.Mode() != binMode || !isOwn(info)):
		return nil // to be replaced, even if it cannot be read
	}
	p.done = true
	p.binary.Version, err = ask(ctx, p.binary.Path, policy.Printable(p.binary.Path))
	return err
}

// isOwn reports whether a file belongs to this process's user.
func isOwn(info fs.FileInfo) bool {
	s, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(s.Uid) == os.Geteuid()
}

func (p *placement) stage(context.Context) (err error) {
	p.temp, err = p.folder.Stage(p.data, runnable)
	return err
}

func (p *placement) try(ctx context.Context) (err error) {
	p.binary.Version, err = ask(ctx, p.folder.PathOf(p.temp), "a copy of "+policy.Printable(p.source)+" there")
	return err
}

func (p *placement) rename(context.Context) error {
	if err := p.folder.Rename(p.temp, config.PluginType); err != nil {
		return err
	}
	p.temp = ""
	p.binary.Wrote = true
	return nil
}

func (p *placement) sync(context.Context) error {
	if err := p.folder.Sync(); err != nil {
		return fmt.Errorf("the new plugin is in place: %w", err)
	}
	return nil
}

// readBinary reads a whole program.
func readBinary(path string) ([]byte, fs.FileInfo, error) {
	const most = 256 << 20
	return safefile.ReadFile(path, most)
}
