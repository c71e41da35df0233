// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// ErrChanged says that a file is not, or no longer, as the caller read it. It was
// left alone; begin anew with its present text.
var ErrChanged = errors.New("was changed by somebody else meanwhile")

// Replace puts another text in the place of a file's present one, which the
// caller states. It gives up with ErrChanged where the file has another one, and
// refuses a text that no runtime would load from a file of that name.
//
// The file keeps its mode and owner. A symlink stays one: its target is replaced.
// Whatever happens there is a whole file at the path, old or new, and no other
// that a runtime would load; what a killed process leaves is removed by the next
// call for the directory.
//
// Old and new are exchanged, and what was taken out is read again: who replaced
// the file in the last moment gets it back, unless we are killed right then. Only who writes in place, and goes on
// after that, writes into a file that is gone. On file systems that cannot
// exchange (NFS) the moment between the last look and the rename stays.
//
// An error that comes after the new text is in force, as of a sync, says so.
// Until ctx ends it waits for the directory, should another process of ours have
// that locked, but not for long.
func Replace(ctx context.Context, path string, was, now []byte) error {
	r := &replacement{ctx: ctx, path: path, was: was, now: now}
	err := r.run(r.steps())
	if err != nil {
		return fmt.Errorf("replace %s: %w", policy.Printable(path), err)
	}
	return nil
}

// replacement is a Replace under way. Its steps come in turn, and a process may
// be killed between any two.
type replacement struct {
	path     string
	was, now []byte
	ctx      context.Context // of waiting for the directory alone

	target string // the path, with symlinks resolved
	folder *safefile.Dir
	temp   string // "" : there is none, or it must stay
	swapped,
	done bool
}

func (r *replacement) steps() []func() error {
	return []func() error{r.check, r.lock, r.stage, r.compare, r.exchange, r.verify, r.clear, r.sync, r.announce}
}

func (r *replacement) run(steps []func() error) error {
	var err error
	for _, step := range steps {
		if err = step(); err != nil || r.done {
			break
		}
	}
	if r.folder == nil {
		return err
	}
	if err != nil && r.temp != "" {
		err = errors.Join(err, r.folder.Remove(r.temp))
	}
	return errors.Join(err, r.folder.Close())
}

func (r *replacement) check() error {
	if err := loads(r.path, r.now); err != nil {
		return fmt.Errorf("the new text: %w", err)
	}
	target, err := filepath.EvalSymlinks(r.path)
	if errors.Is(err, os.ErrNotExist) {
		return cmp.Or(absent(r.path, ErrChanged), ErrChanged)
	}
	if err != nil {
		return safefile.Error("resolve", r.path, err)
	}
	r.target = target
	if bytes.Equal(r.was, r.now) {
		_, err := unchanged(r.target, r.was)
		r.done = true
		return err
	}
	return nil
}

func (r *replacement) lock() (err error) {
	r.folder, err = openFolder(r.ctx, filepath.Dir(r.target))
	return err
}

func (r *replacement) stage() error {
	info, err := unchanged(r.target, r.was)
	if err != nil {
		return err
	}
	r.temp, err = r.folder.Stage(r.now, like(info))
	return err
}

func (r *replacement) compare() error {
	_, err := unchanged(r.target, r.was)
	return err
}

func (r *replacement) exchange() error { return r.exchanged(r.swap()) }

// exchanged goes by what came of the exchange.
func (r *replacement) exchanged(err error) error {
	switch {
	case err == nil:
		r.swapped = true
	case errors.Is(err, unix.ENOENT):
		return ErrChanged
	case errors.Is(err, errors.ErrUnsupported), errors.Is(err, unix.EINVAL):
		if err := r.folder.Rename(r.temp, filepath.Base(r.target)); err != nil {
			return err
		}
		r.temp = ""
	default:
		return err
	}
	return nil
}

func (r *replacement) swap() error {
	return r.folder.Exchange(r.temp, filepath.Base(r.target))
}

// verify looks at what was taken out, and puts it back if it is not what it was
// taken for.
func (r *replacement) verify() error {
	if !r.swapped {
		return nil
	}
	_, err := unchanged(r.folder.PathOf(r.temp), r.was)
	if err == nil {
		return nil
	}
	if back := r.swap(); back != nil {
		return r.keep(back)
	}
	r.swapped = false
	return err
}

// keep gives what was taken out, and cannot be put back, a name by which neither
// we nor runtimes know it: it is somebody's only copy. To begin anew would be to
// say nothing of that, so the error is no ErrChanged.
func (r *replacement) keep(cause error) error {
	kept := strings.TrimSuffix(r.temp, safefile.TempSuffix) + keptSuffix
	if err := r.folder.Rename(r.temp, kept); err != nil {
		cause, kept = errors.Join(cause, err), r.temp
	}
	r.temp = ""
	return fmt.Errorf("somebody else wrote it in the same moment, and what he wrote is in %s now: %w", policy.Printable(r.folder.PathOf(kept)), cause)
}

func (r *replacement) clear() error {
	if r.temp == "" {
		return nil
	}
	temp := r.temp
	r.temp = ""
	if err := r.folder.Remove(temp); err != nil {
		return fmt.Errorf("the new text is in force: %w", err)
	}
	return nil
}

func (r *replacement) sync() error {
	if err := r.folder.Sync(); err != nil {
		return fmt.Errorf("the new text is in force: %w", err)
	}
	return nil
}

// announce makes runtimes look that watch the directory of a symlink: they do
// not see what happens in that of its target.
func (r *replacement) announce() error {
	dir, err := filepath.EvalSymlinks(filepath.Dir(r.path))
	if err != nil || dir == r.folder.Path() {
		return err
	}
	f, err := openFolder(r.ctx, dir)
	if err != nil {
		return fmt.Errorf("the new text is in force: %w", err)
	}
	temp, err := f.Stage(nil, nil)
	if err == nil {
		err = f.Remove(temp)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("the new text is in force: %w", err)
	}
	return nil
}
