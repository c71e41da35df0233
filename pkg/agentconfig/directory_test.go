// SPDX-License-Identifier: Apache-2.0

package agentconfig

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

func link(t testing.TB, target, path string) {
	t.Helper()
	assert.NoError(t, os.Symlink(target, path))
}

// exempt returns the prefixes in nonMasqueradeCIDRs of all files, each once.
func exempt(a Files) []netip.Prefix {
	all := []netip.Prefix{}
	for _, f := range a.Source.Files {
		for _, p := range f.Policy.NonMasqueradeCIDRs {
			if !slices.Contains(all, p) {
				all = append(all, p)
			}
		}
	}
	return all
}

// in reads within a time in which any file can be read.
func in(t testing.TB, dir string) (Files, error) {
	t.Helper()
	type result struct {
		files Files
		err   error
	}
	done := make(chan result, 1)
	go func() {
		files, err := Read(dir, config.DialectV1, config.AgentPolicy{})
		done <- result{files, err}
	}()
	select {
	case r := <-done:
		return r.files, r.err
	case <-time.After(timelimit.Wait):
		t.Fatalf("reading %s hangs", dir)
		return Files{}, nil
	}
}

func TestAgentFilesThatCannotBeRead(t *testing.T) {
	const remedy = "; fix it, remove it, or give it a name that does not begin with ip-masq"
	for _, c := range []struct {
		name string
		make func(path string) error
		want string
	}{
		{"a directory", func(path string) error { return os.Mkdir(path, 0o755) }, "read FILE: not a regular file" + remedy},
		{"a FIFO", func(path string) error { return syscall.Mkfifo(path, 0o644) }, "read FILE: not a regular file" + remedy},
		{"a link to nothing", func(path string) error { return os.Symlink("nothing", path) }, "open FILE: not a regular file: it is a symlink to what is not there; in a container, mount the directory it points to as well" + remedy},
		{"a file that fails", func(path string) error { return os.Symlink("/proc/self/mem", path) }, "read FILE: input/output error" + remedy},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := agentDirOf(t, "ip-masq-z", "masqLinkLocal: 1")
			path := filepath.Join(dir, "ip-masq-agent")
			assert.NoError(t, c.make(path))
			got, err := in(t, dir)
			policytest.WantError(t, err, path, c.want+"; "+filepath.Join(dir, "ip-masq-z")+":1: masqLinkLocal: 1 is a number; write true or false")
			assert.Equal(t, "names", got.Names, []string{"ip-masq-z"})
		})
	}
}

// Root reads everything, so this reads with another's rights.
func TestAgentFilesWithoutTheRight(t *testing.T) {
	dir, closed := t.TempDir(), t.TempDir()
	path := write(t, filepath.Join(dir, "ip-masq-agent"), "masqLinkLocal: true")
	for path, mode := range map[string]os.FileMode{filepath.Dir(dir): 0o755, path: 0, closed: 0} {
		assert.NoError(t, os.Chmod(path, mode))
	}
	runtime.LockOSThread() // and the thread ends with the test
	if os.Geteuid() == 0 {
		become := func(uid uintptr) { // of this thread alone
			if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, ^uintptr(0), uid, ^uintptr(0)); errno != 0 {
				t.Fatal(errno)
			}
		}
		become(65534)
		defer become(0)
	}
	_, err := Read(dir, config.DialectV1, config.AgentPolicy{})
	policytest.WantError(t, err, path, "open FILE: permission denied; fix it, remove it, or give it a name that does not begin with ip-masq")
	_, err = Read(closed, config.DialectV1, config.AgentPolicy{})
	policytest.WantError(t, err, closed, "read the agent files in FILE: permission denied")
}

// configMap is a directory as the kubelet mounts a ConfigMap.
type configMap struct {
	dir string
	nth int
}

// swap makes a version hold, as the kubelet does: the files, the link by one
// rename, the links that people see, and the removal of what held before.
func (c *configMap) swap(files map[string]string) error {
	data := filepath.Join(c.dir, configMapData)
	old, err := os.Readlink(data)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	c.nth++
	version := fmt.Sprintf("..2026_01_02_%d", c.nth)
	if err := os.Mkdir(filepath.Join(c.dir, version), 0o755); err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(c.dir, version, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	if err := os.Symlink(version, data+"_tmp"); err != nil {
		return err
	}
	if err := os.Rename(data+"_tmp", data); err != nil {
		return err
	}
	for name := range files {
		if err := os.Symlink(filepath.Join(configMapData, name), filepath.Join(c.dir, name)); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if _, there := files[e.Name()]; !there && !strings.HasPrefix(e.Name(), "..") && e.Type()&os.ModeSymlink != 0 {
			if err := os.Remove(filepath.Join(c.dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if old == "" {
		return nil
	}
	return os.RemoveAll(filepath.Join(c.dir, old))
}

func TestAgentFilesOfAConfigMap(t *testing.T) {
	c := configMap{dir: t.TempDir()}
	assert.NoError(t, c.swap(map[string]string{"ip-masq-agent": "nonMasqueradeCIDRs: [10.0.0.0/8]", "ip-masq-more": "masqLinkLocal: true", "notes": ""}))
	// Before and after the kubelet makes and removes some links.
	link(t, "..data/ip-masq-gone", filepath.Join(c.dir, "ip-masq-gone"))
	assert.NoError(t, os.Remove(filepath.Join(c.dir, "ip-masq-more")))
	got, err := Read(c.dir, config.DialectV1, config.AgentPolicy{})
	assert.NoError(t, err)
	assert.Equal(t, "names", got.Names, []string{"ip-masq-agent", "ip-masq-more"})
	assert.Equal(t, "exempt", exempt(got), policytest.Prefixes("10.0.0.0/8"))
	assert.Equal(t, "the first file", got.Source.Files[0].File, filepath.Join(c.dir, "ip-masq-agent"))

	assert.NoError(t, os.RemoveAll(filepath.Join(c.dir, "..2026_01_02_1")))
	_, err = in(t, c.dir)
	policytest.WantError(t, err, c.dir, "read the agent files in FILE: it changes faster than it can be read, or ..data leads to nothing: mount the ConfigMap again, or remove the link")
}

// Whenever a version is swapped for another, what is read is of one version.
func TestAgentFilesAreOfOneVersion(t *testing.T) {
	const files, versions = 8, 400
	version := func(n int) map[string]string {
		all := map[string]string{}
		for i := range files - n%2 { // so that files come and go
			all[fmt.Sprintf("ip-masq-%d", i)] = fmt.Sprintf("nonMasqueradeCIDRs: [10.%d.%d.%d/32]", n/256, n%256, i)
		}
		return all
	}
	c := configMap{dir: t.TempDir()}
	assert.NoError(t, c.swap(version(0)))
	var done atomic.Bool
	swapped := make(chan error, 1)
	go func() {
		defer done.Store(true)
		for n := 1; n <= versions; n++ {
			if err := c.swap(version(n)); err != nil {
				swapped <- err
				return
			}
		}
		swapped <- nil
	}()
	// More readers than processors, so that some are interrupted between two files.
	var readers sync.WaitGroup
	for range 4 * runtime.GOMAXPROCS(0) {
		readers.Go(func() {
			for last := false; ; last = done.Load() {
				got, err := Read(c.dir, config.DialectV1, config.AgentPolicy{})
				if err != nil {
					t.Error(err)
					return
				}
				read := exempt(got)
				if len(read) == 0 {
					t.Error("nothing was read")
					return
				}
				first := read[0].Addr().As4()
				n := int(first[1])*256 + int(first[2])
				want := []netip.Prefix{}
				for i := range files - n%2 {
					want = append(want, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(n / 256), byte(n % 256), byte(i)}), 32))
				}
				if !slices.Equal(want, read) {
					t.Errorf("read %s, want version %d alone: %s", read, n, want)
					return
				}
				if last {
					assert.Equal(t, "the last version read", n, versions)
					return
				}
			}
		})
	}
	readers.Wait()
	assert.NoError(t, <-swapped)
}

func TestLinkedAgentFiles(t *testing.T) {
	elsewhere := agentDirOf(t, "policy.yaml", "masqLinkLocal: true")
	dir := agentDirOf(t)
	link(t, filepath.Join(elsewhere, "policy.yaml"), filepath.Join(dir, "ip-masq-agent"))
	through := filepath.Join(t.TempDir(), "config")
	link(t, dir, through)
	got := assert.Must(Read(through, config.DialectV1, config.AgentPolicy{}))(t)
	assert.Equal(t, "the file", got.Source.Files[0].File, filepath.Join(through, "ip-masq-agent"))
}
