// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const file = "10-net.conflist"

// pair makes a directory with a list, and returns the list's path and text and
// the text with our entry.
func pair(t *testing.T) (path string, was, now []byte) {
	t.Helper()
	was = content(t, "testdata/lists/flannel.conflist")
	now, _, err := Add(was, []byte(entry))
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dirWith(t, map[string]string{file: string(was)}), file), was, now
}

// holds checks a file, and that nothing else is in its directory.
func holds(t *testing.T, path string, doc []byte) {
	t.Helper()
	if got := string(content(t, path)); got != string(doc) {
		t.Errorf("%s holds %q", path, got)
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("%v beside it, %v", entries, err)
	}
}

func TestReplaceKeepsModeAndOwner(t *testing.T) {
	path, was, now := pair(t)
	if err := errors.Join(os.Chmod(path, 0o640), os.Chown(path, 12, 34)); err != nil {
		t.Fatal(err)
	}
	old := unix.Umask(0o777)
	defer unix.Umask(old)
	if err := Replace(t.Context(), path, was, now); err != nil {
		t.Fatal(err)
	}
	holds(t, path, now)
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o640 || owner(info) != (ids{12, 34}) {
		t.Error(info.Mode(), owner(info), err)
	}
}

func TestReplaceWithTheSameWritesNothing(t *testing.T) {
	path, was, _ := pair(t)
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := Replace(t.Context(), path, was, was); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Error("another file", err)
	}
}

func TestReplaceRefuses(t *testing.T) {
	path, was, now := pair(t)
	for _, bad := range []string{"", "{", string(now[:len(now)-5]), `{"name":"n"}x`, single, `{"name":"n","plugins":[]}`} {
		if err := Replace(t.Context(), path, was, []byte(bad)); err == nil || !strings.Contains(err.Error(), "the new text: ") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	for _, err := range []error{Replace(t.Context(), path, now, was), Replace(t.Context(), path, now, now), Replace(t.Context(), path+".conflist", was, now)} {
		if !errors.Is(err, ErrChanged) {
			t.Error(err)
		}
	}
	holds(t, path, was)
}

// Somebody else is at work between two of our steps: what is theirs stays.
func TestWhoeverChangesTheFileMeanwhileWins(t *testing.T) {
	const theirs = `{"name":"theirs","plugins":[{"type":"bridge"}]}`
	for name, change := range map[string]func(t *testing.T, path string){
		"by a rename": func(t *testing.T, path string) {
			temp := filepath.Join(t.TempDir(), "x")
			if err := errors.Join(os.WriteFile(temp, []byte(theirs), 0o600), os.Rename(temp, path)); err != nil {
				t.Fatal(err)
			}
		},
		"in place": func(t *testing.T, path string) {
			if err := os.WriteFile(path, []byte(theirs), 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"by a removal": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		},
	} {
		for after := range 5 { // the last is between the comparison and the exchange
			path, was, now := pair(t)
			r := &replacement{ctx: t.Context(), path: path, was: was, now: now}
			steps := r.steps()
			meanwhile := func() error { change(t, path); return nil }
			err := r.run(slices.Insert(steps, after, meanwhile))
			if !errors.Is(err, ErrChanged) {
				t.Errorf("%s after %d steps: %v", name, after, err)
			}
			if name == "by a removal" {
				if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) > 0 {
					t.Errorf("%s after %d steps: %v, %v", name, after, entries, err)
				}
				continue
			}
			holds(t, path, []byte(theirs))
		}
	}
}

func TestWhereFilesCannotBeExchangedTheyAreRenamed(t *testing.T) {
	path, was, now := pair(t)
	r := &replacement{ctx: t.Context(), path: path, was: was, now: now}
	steps := r.steps()
	steps[4] = func() error { return r.exchanged(unix.EINVAL) }
	if err := r.run(steps); err != nil {
		t.Fatal(err)
	}
	holds(t, path, now)
}

func TestReplaceFollowsASymlink(t *testing.T) {
	path, was, now := pair(t)
	dir := t.TempDir()
	link := filepath.Join(dir, "05-link.conflist")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_DELETE|unix.IN_MOVED_FROM); err != nil {
		t.Fatal(err)
	}
	if err := Replace(t.Context(), link, was, now); err != nil {
		t.Fatal(err)
	}
	holds(t, path, now)
	holds(t, link, now)
	if to, err := os.Readlink(link); err != nil || to != path {
		t.Error("no longer a link:", to, err)
	}
	if n, err := unix.Read(fd, make([]byte, 4096)); err != nil || n == 0 {
		t.Error("who watches the directory of the link saw nothing:", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := Replace(t.Context(), link, now, was); err == nil || !strings.Contains(err.Error(), "mount the directory it points to") {
		t.Error(err)
	}
}

func TestOnlyWhatIsOursIsSweptAway(t *testing.T) {
	path, was, now := pair(t)
	dir := filepath.Dir(path)
	foreign := []string{".ip-masq-x.tmp.conf~", ".ip-masq-.tmp", ".ip-masq-A B.tmp", "ip-masq-1.tmp", ".10-net.conflist.swp"}
	for _, name := range append(foreign, ".ip-masq-1abc.tmp", ".ip-masq-zz9.tmp") {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, ".ip-masq-5.tmp"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Replace(t.Context(), path, was, now); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(foreign)+2 {
		t.Error(entries, err)
	}
}

func TestCreateAndDelete(t *testing.T) {
	path, was, now := pair(t)
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(filepath.Dir(path), "05.conflist")
	if err := Create(t.Context(), other, now[1:], path); err == nil {
		t.Error("wrote what does not load")
	}
	if err := Create(t.Context(), other, now, path); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(other); err != nil || info.Mode() != 0o640 {
		t.Error(info, err)
	}
	for _, err := range []error{Create(t.Context(), other, was, path), Delete(t.Context(), other, was)} {
		if !errors.Is(err, ErrChanged) {
			t.Error(err)
		}
	}
	if string(content(t, other)) != string(now) {
		t.Error("was overwritten")
	}
	if err := Delete(t.Context(), other, now); err != nil {
		t.Fatal(err)
	}
	holds(t, path, was)
	if err := Delete(t.Context(), other, now); !errors.Is(err, ErrChanged) {
		t.Error(err)
	}
}

func TestBackup(t *testing.T) {
	path, was, now := pair(t)
	system := filepath.Join(t.TempDir(), "system")
	dir := filepath.Join(system, "state", "backups")
	kept, err := Backup(t.Context(), dir, path, was)
	if err != nil {
		t.Fatal(err)
	}
	for made, mode := range map[string]os.FileMode{system: 0o755, filepath.Dir(dir): 0o700, dir: 0o700} {
		if info, err := os.Stat(made); err != nil || info.Mode().Perm() != mode {
			t.Error(made, info.Mode(), err)
		}
	}
	info, err := os.Stat(kept)
	if err != nil || info.Mode() != 0o600 {
		t.Error(info, err)
	}
	again, err := Backup(t.Context(), dir, path, was)
	if err != nil || again != kept {
		t.Error(again, err)
	}
	if same, err := os.Stat(kept); err != nil || !os.SameFile(info, same) {
		t.Error("was written again", err)
	}
	holds(t, kept, was)
	if err := os.WriteFile(kept, was[:5], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Backup(t.Context(), dir, path, was); err != nil {
		t.Fatal(err)
	}
	holds(t, kept, was) // a damaged one is mended

	if _, err := Backup(t.Context(), dir, "/elsewhere/other.conflist", now); err != nil {
		t.Fatal(err)
	}
	var latest string
	for i := range 2 * MostBackups {
		if latest, err = Backup(t.Context(), dir, path, append(now, strings.Repeat(" ", i)...)); err != nil {
			t.Fatal(err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != MostBackups+1 {
		t.Error(len(entries), "backups", err)
	}
	content(t, kept) // the first stays
	content(t, latest)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := Backup(t.Context(), dir, path, was); err == nil || !strings.Contains(err.Error(), "nobody else can write to") {
		t.Error(err)
	}
}
