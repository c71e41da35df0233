// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

// plugin is a program that answers as the plugin of that version.
func plugin(version string) string { return saying("CNI ip-masq plugin " + version) }

func saying(about string) string { return "#!/bin/sh\necho '" + about + "' >&2\n" }

func write(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	assert.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	assert.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	assert.NoError(t, os.Chmod(path, mode))
}

func content(t *testing.T, path string) string {
	t.Helper()
	text := assert.Must(os.ReadFile(path))(t)
	return string(text)
}

// tree is all that is in a directory: paths, modes, inodes and contents.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	assert.NoError(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s %o %d\n", path, st.Mode, st.Ino)
		if st.Mode&unix.S_IFMT == unix.S_IFREG {
			b.WriteString(content(t, path))
		}
		return nil
	}))
	return b.String()
}

// binDir is a source and a directory of plugins, which has the bridge plugin.
func binDir(t *testing.T) (source, dir string) {
	t.Helper()
	source, dir = filepath.Join(t.TempDir(), "ip-masq"), filepath.Join(t.TempDir(), "bin")
	write(t, source, plugin("v2"), 0o700)
	write(t, filepath.Join(dir, "bridge"), saying("CNI bridge plugin v1"), 0o755)
	return source, dir
}

func TestCopy(t *testing.T) {
	for name, before := range map[string]func(*testing.T, string){
		"nothing":        func(*testing.T, string) {},
		"an earlier one": func(t *testing.T, path string) { write(t, path, plugin("v1"), 0o755) },
		"another mode":   func(t *testing.T, path string) { write(t, path, plugin("v2"), 0o700) },
		"setuid":         func(t *testing.T, path string) { write(t, path, plugin("v2"), 0o755|os.ModeSetuid) },
		"half a file":    func(t *testing.T, path string) { write(t, path, plugin("v2")[:20], 0o755) },
		"of another user": func(t *testing.T, path string) {
			write(t, path, plugin("v2"), 0o755)
			assert.NoError(t, os.Chown(path, 12, 12))
		},
		"leftovers": func(t *testing.T, path string) {
			write(t, filepath.Join(filepath.Dir(path), ".ip-masq-3k5.tmp"), "half", 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			source, dir := binDir(t)
			path := filepath.Join(dir, "ip-masq")
			before(t, path)
			umask := unix.Umask(0o077)
			b, err := Copy(t.Context(), source, dir)
			unix.Umask(umask)
			assert.NoError(t, err)
			if b != (Binary{Path: path, Version: "v2", Wrote: true}) {
				t.Errorf("is reported as %+v", b)
			}
			info := assert.Must(os.Lstat(path))(t)
			if info.Mode() != 0o755 || !safefile.IsOwn(info) || content(t, path) != plugin("v2") {
				t.Errorf("is there with mode %v:\n%s", info.Mode(), content(t, path))
			}
			only(t, dir, "bridge", "ip-masq")

			was := tree(t, dir)
			b, err = Copy(t.Context(), source, dir)
			if err != nil || b != (Binary{Path: path, Version: "v2"}) {
				t.Errorf("the second time: %+v, %v", b, err)
			}
			assert.Equal(t, "what is there after it was written again", tree(t, dir), was)
		})
	}
}

func only(t *testing.T, dir string, names ...string) {
	t.Helper()
	entries := assert.Must(os.ReadDir(dir))(t)
	var have []string
	for _, e := range entries {
		have = append(have, e.Name())
	}
	if strings.Join(have, " ") != strings.Join(names, " ") {
		t.Errorf("there is %v, want %v", have, names)
	}
}

// TestCopyRefuses: whatever is wrong, what was there is there still, the message
// says what to do, and nothing is left behind.
func TestCopyRefuses(t *testing.T) {
	path := func(dir string) string { return filepath.Join(dir, "ip-masq") }
	for name, c := range map[string]struct {
		arrange func(t *testing.T, source, dir string)
		says    []string
	}{
		"no source":   {func(t *testing.T, source, _ string) { gone(t, source) }, []string{"no plugin at", "--plugin"}},
		"a directory": {func(t *testing.T, source, _ string) { gone(t, source); write(t, source+"/x", "", 0o600) }, []string{"not a regular file", "--plugin"}},
		"another machine": {func(t *testing.T, source, _ string) {
			write(t, source, "\x7fELF\x02\x01\x01 of some other kind", 0o755)
		}, []string{"exec format error", "--plugin"}},
		"no loader": {func(t *testing.T, source, _ string) { write(t, source, "#!/no/such/loader\n", 0o755) }, []string{"no such file"}},
		"another plugin": {func(t *testing.T, source, _ string) {
			write(t, source, saying("CNI bridge plugin v1"), 0o755)
		}, []string{`"CNI bridge plugin v1"`, "--plugin"}},
		"no plugin at all":     {func(t *testing.T, source, _ string) { write(t, source, "#!/bin/sh\necho hello\n", 0o755) }, []string{`"hello"`, "--plugin"}},
		"one that fails":       {func(t *testing.T, source, _ string) { write(t, source, "#!/bin/sh\necho no room >&2; exit 3\n", 0o755) }, []string{"exit status 3", `"no room"`}},
		"a directory is there": {func(t *testing.T, _, dir string) { write(t, path(dir)+"/x", "", 0o600) }, []string{"is not a regular file", "remove it"}},
		"a fifo is there":      {func(t *testing.T, _, dir string) { fifo(t, path(dir)) }, []string{"is not a regular file"}},
		"a link to another": {func(t *testing.T, _, dir string) {
			assert.NoError(t, os.Symlink("bridge", path(dir)))
		}, []string{"is not a regular file"}},
		"no programs run there": {func(t *testing.T, _, dir string) {
			mount(t, dir, unix.MS_NOEXEC)
			write(t, path(dir), plugin("v1"), 0o755)
		}, []string{"permission denied"}},
		"no room there": {func(t *testing.T, source, dir string) {
			mount(t, dir, 0)
			write(t, source, plugin("v2")+strings.Repeat("#", 1<<20), 0o755)
		}, []string{"no space left"}},
		"read-only": {func(t *testing.T, _, dir string) { mount(t, dir, unix.MS_RDONLY) }, []string{"read-only file system"}},
	} {
		t.Run(name, func(t *testing.T) {
			source, dir := binDir(t)
			if name != "another plugin" {
				write(t, path(dir), plugin("v1"), 0o755)
				if strings.Contains(name, "is there") || strings.HasPrefix(name, "a link") {
					gone(t, path(dir))
				}
			}
			c.arrange(t, source, dir)
			was := tree(t, dir)
			b, err := Copy(t.Context(), source, dir)
			if err == nil || b != (Binary{}) {
				t.Fatalf("is done: %+v", b)
			}
			says := append([]string{dir}, c.says...)
			if strings.Contains(err.Error(), "run a copy") {
				says = append(says, source)
			}
			if strings.Contains(err.Error(), "run "+dir+"/"+safefile.TempPrefix) {
				t.Errorf("names a file that is gone: %v", err)
			}
			assert.ErrorContains(t, err, says...)
			assert.Equal(t, "what is there", tree(t, dir), was)
		})
	}
}

func TestCopyWithoutDirectory(t *testing.T) {
	source, dir := binDir(t)
	_, err := Copy(t.Context(), source, dir+"2")
	assert.ErrorContains(t, err, "--cni-bin-dir")
	if _, err := os.Lstat(dir + "2"); !os.IsNotExist(err) {
		t.Error("was made:", err)
	}
}

func gone(t *testing.T, path string) {
	t.Helper()
	assert.NoError(t, os.RemoveAll(path))
}

func fifo(t *testing.T, path string) {
	t.Helper()
	assert.NoError(t, unix.Mkfifo(path, 0o755))
}

// mount puts a small file system over a directory.
func mount(t *testing.T, dir string, flags uintptr) {
	t.Helper()
	assert.NoError(t, unix.Mount("none", dir, "tmpfs", flags, "size=64k"))
	t.Cleanup(func() {
		assert.NoError(t, unix.Unmount(dir, 0))
	})
}

// TestHangingProgram: a program that hangs is ended, and so is waiting for the output of what it left running.
func TestHangingProgram(t *testing.T) {
	for name, script := range map[string]string{"hangs": "exec sleep 1000", "leaves another": "sleep 10 & echo hello"} {
		t.Run(name, func(t *testing.T) {
			source, _ := binDir(t)
			write(t, source, "#!/bin/sh\n"+script+"\n", 0o700)
			_, err := version(t.Context(), source, "the plugin", time.Second)
			assert.ErrorContains(t, err, "--plugin")
		})
	}
}

// TestCopyStopped: who stops an install hears that, and not what was waited for.
func TestCopyStopped(t *testing.T) {
	source, dir := binDir(t)
	holder := assert.Must(lockDir(t.Context(), dir))(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := Copy(ctx, source, dir); !errors.Is(err, ErrStopped) {
		t.Error("while it waits for the lock:", err)
	}
	assert.NoError(t, holder.Close())
	write(t, source, "#!/bin/sh\nexec sleep 1000\n", 0o755)
	ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := Copy(ctx, source, dir); !errors.Is(err, ErrStopped) {
		t.Error("while it asks:", err)
	}
	only(t, dir, "bridge")
}

// TestVersion: of a plugin that is installed only what it says of itself counts, so that
// one of another release is known too.
func TestVersion(t *testing.T) {
	for text, want := range map[string]string{
		plugin("v0.1"): "v0.1", saying("bridge v1: bridges"): "", "#!/bin/sh\nexit 1\n": "",
	} {
		source, _ := binDir(t)
		write(t, source, text, 0o755)
		if have, err := Version(t.Context(), source); have != want || (err == nil) != (want != "") {
			t.Errorf("%q, %v, want %q", have, err, want)
		}
	}
}
