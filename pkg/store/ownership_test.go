// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

const marker = "made-by-ip-masq"

// put writes files below a directory. Names that end in a slash are directories.
func put(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		path, isDir := strings.CutSuffix(filepath.Join(dir, "x")[:len(dir)+1]+name, "/")
		if isDir {
			ok(t, os.MkdirAll(path, 0o700))
			continue
		}
		ok(t, os.MkdirAll(filepath.Dir(path), 0o700))
		ok(t, os.WriteFile(path, []byte("{}"), 0o600))
	}
}

var (
	hash   = strings.Repeat("0a", 32)
	backup = "backups/10-podnet.conflist." + hash + ".bak"
)

// operations are all that is done to a dataDir.
func operations(t *testing.T) map[string]func(*store.Dir) error {
	return map[string]func(*store.Dir) error{
		"Load":         func(d *store.Dir) error { _, err := d.Load(); return err },
		"Lock":         func(d *store.Dir) error { _, err := d.Lock(t.Context()); return err },
		"InstanceLock": func(d *store.Dir) error { _, err := d.InstanceLock(); return err },
		"Attach":       func(d *store.Dir) error { return d.Attach(aPod("net", "c", "eth0")) },
		"CheckAttach":  func(d *store.Dir) error { return d.CheckAttach("net") },
		"Detach":       func(d *store.Dir) error { return d.Detach(aPod("net", "c", "eth0").Attachment) },
		"Prune":        func(d *store.Dir) error { return d.Prune("net", nil) },
		"Attachments":  func(d *store.Dir) error { _, _, err := d.Attachments("net"); return err },
		"PutVerificationCache": func(d *store.Dir) error {
			return d.PutVerificationCache(network("net"), store.VerificationCache{Inputs: "i", Entry: "e", Generation: "m"})
		},
	}
}

// The author of a NetworkAttachmentDefinition can name any directory of the
// node as dataDir. One that ip-masq did not make is refused, and stays as it is.
func TestDirectoriesOfOtherProgramsAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		holds []string
		says  string
	}{
		"uploads":               {[]string{"attachments/customers/invoice.pdf"}, "attachments"},
		"a temporary directory": {[]string{"record.json.0.tmp/f"}, "record.json.0.tmp"},
		"empty directories":     {[]string{"sources/", "attachments/"}, "attachments"},
		"locks":                 {[]string{"lock", "backups/"}, "backups"},
		"an instance lock":      {[]string{"reconciler.lock"}, "reconciler.lock"},
		"a record":              {[]string{"record.json"}, "record.json"},
		"a backup":              {[]string{backup}, "backups"},
		"record of conflists":   {[]string{"backups/conflists.json", "backups/own-conflist.json"}, "backups"},
		"an attachment":         {[]string{"attachments/" + boot + "/" + hash + "/"}, "attachments"},
		"a marker that is none": {[]string{marker + "/"}, marker},
	} {
		t.Run(name, func(t *testing.T) {
			d := open(t)
			ok(t, os.Mkdir(d.Path(), 0o755))
			put(t, d.Path(), c.holds...)
			before := tree(t, filepath.Dir(d.Path()))
			for operation, do := range operations(t) {
				t.Run(operation, func(t *testing.T) {
					refused(t, do(d), d.Path(), []string{c.says, "ip-masq", "set dataDir to a directory that does not exist or is empty"})
				})
			}
			same(t, tree(t, filepath.Dir(d.Path())), before)
		})
	}
}

// An empty directory, as the kubelet and systemd create it, gets the marker when it is written to.
func TestEmptyDirectory(t *testing.T) {
	d := open(t)
	ok(t, os.Mkdir(d.Path(), 0o700))
	before := tree(t, d.Path())
	load(t, d)
	ok(t, d.CheckAttach("net"))
	same(t, tree(t, d.Path()), before) // reading marks nothing
	ok(t, d.Attach(aPod("net", "c", "eth0")))
	if info, err := os.Lstat(d.Path() + "/" + marker); err != nil || info.Mode() != 0o600 {
		t.Fatalf("no marker: %v, %v", info, err)
	}
	put(t, d.Path(), "notes") // which now is nobody's business
	ok(t, d.Attach(aPod("net", "d", "eth0")))
	load(t, d)
}

// Where something else came to lie in a dataDir, nothing of it is removed.
func TestOtherFilesInADataDirStay(t *testing.T) {
	d := open(t)
	document(t, d, newSource("net"))
	ok(t, d.Attach(aPod("net", "c", "eth0")))
	networks := assert.Must(filepath.Glob(d.Path() + "/attachments/*/*"))(t)
	others := []string{
		"upload.tmp/deep/f", "session.tmp", "record.json.tmp", "record.json.0.tmp/f", "sources/x.json.0.tmp", "sources/main.tmp",
		"sources/" + hash + ".json.damaged/f", "attachments/customers/invoice.pdf", "attachments/" + another + "/invoice.pdf",
		"attachments/" + another + "/" + hash + "/invoice.pdf",
		networks[0][len(d.Path())+1:] + "/invoice.pdf", networks[0][len(d.Path())+1:] + "/" + hash + "/f", "backups/db.sql", "backups/db.sql.bak",
	}
	put(t, d.Path(), others...)
	ok(t, store.Open(d.Path()).WithBoot(another).Attach(aPod("net", "d", "eth0")))
	l := lock(t, d)
	ok(t, d.Prune("net", nil))
	ok(t, l.Tidy())
	ok(t, drop(l, network("net")))
	put(t, d.Path(), backup)
	ok(t, l.Destroy())
	left := 0
	for path, mode := range tree(t, d.Path()) {
		if mode.IsRegular() {
			left++
		} else if entries, err := os.ReadDir(d.Path() + path); err != nil || len(entries) == 0 {
			t.Errorf("%s is left and empty (%v)", path, err)
		}
	}
	same(t, left, len(others)+1) // the marker, as directories of ip-masq's names stay
	for _, name := range others {
		if data, err := os.ReadFile(filepath.Join(d.Path(), name)); string(data) != "{}" || err != nil {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
}

// Nobody ever finds a dataDir that was made and has no marker yet.
func TestDataDirIsMadeWithItsMarker(t *testing.T) {
	above := t.TempDir()
	done := make(chan struct{})
	var watch, work sync.WaitGroup
	watch.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			dirs, err := filepath.Glob(above + "/state*")
			if err != nil {
				t.Error(err)
			}
			for _, dir := range dirs {
				if _, err := os.Lstat(dir + "/" + marker); err != nil {
					t.Errorf("%s was made without its marker: %v", dir, err)
				}
			}
		}
	})
	for round := range 30 {
		for i := range 10 {
			d := store.Open(fmt.Sprintf("%s/state%d-%d", above, round, i%2)).WithBoot(boot)
			work.Go(func() {
				var err error
				switch i / 2 % 3 {
				case 0:
					err = d.Attach(aPod("net", fmt.Sprint(i), "eth0"))
				case 1:
					var l *store.Lock
					if l, err = d.Lock(t.Context()); err == nil {
						err = l.Release()
					}
				default:
					var l *store.InstanceLock
					if l, err = d.InstanceLock(); err == nil {
						err = l.Release()
					} else if errors.Is(err, store.ErrBusy) {
						err = nil
					}
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		work.Wait()
	}
	close(done)
	watch.Wait()
	dirs := assert.Must(os.ReadDir(above))(t)
	same(t, len(dirs), 60) // and nothing else is left
}

// A dataDir is made again while another process destroys it, over and over. It
// may be refused at the instant at which it is half destroyed, and never after.
func TestDestroyBesideOthers(t *testing.T) {
	d := open(t)
	var work sync.WaitGroup
	until := time.Now().Add(time.Second)
	for i := range 4 {
		work.Go(func() {
			for time.Now().Before(until) {
				err := d.Attach(aPod("net", fmt.Sprint(i), "eth0"))
				if err != nil && !errors.Is(err, store.ErrRefused) {
					t.Error(err)
				}
				l, err := d.Lock(t.Context())
				if errors.Is(err, store.ErrRefused) {
					continue
				}
				ok := err == nil
				if ok && i == 0 {
					err = l.Destroy()
				}
				if ok {
					err = errors.Join(err, l.Release())
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	ok(t, d.Attach(aPod("net", "last", "eth0")))
	ok(t, lock(t, d).Release())
}
