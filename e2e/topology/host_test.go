// SPDX-License-Identifier: Apache-2.0

package topology_test

import (
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var stat unix.Stat_t
	assert.NoError(t, unix.Stat(path, &stat))
	return stat.Ino
}

// remains is what a process has while a topology exists, and no longer.
type remains struct {
	Hosts, Links, Files, Goroutines int
	// MainThread is its network namespace, which /proc/self shows.
	MainThread uint64
}

func takeStock(t *testing.T) remains {
	t.Helper()
	count := func(pattern string) int {
		return len(assert.Must(filepath.Glob(pattern))(t))
	}
	links := assert.Must(net.Interfaces())(t)
	return remains{
		Hosts:      count("/run/netns/*"),
		Links:      len(links),
		Files:      count("/proc/self/fd/*"),
		Goroutines: runtime.NumGoroutine(),
		MainThread: inode(t, "/proc/self/ns/net"),
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	before := takeStock(t)
	w := topology.New(t, topology.Options{})
	pod := w.AddPod(t, "pod", addr("10.0.0.2"))
	w.NewPod(t, "bare")
	conn := assert.Must(pod.OpenTCP(echo("1.2.3.4")))(t)
	if during := takeStock(t); during.Hosts != before.Hosts+5 || during.MainThread != before.MainThread {
		t.Errorf("5 hosts were made: from %+v to %+v", before, during)
	}
	second := topology.Run(func(t topology.T) { w.AddPod(t, "pod", addr("10.0.0.3")) })
	if second == nil || !strings.Contains(second.Error(), unix.EEXIST.Error()) {
		t.Errorf("a second pod of that name: got %v, want %v", second, unix.EEXIST)
	}
	assert.NoError(t, conn.Close())
	for range 2 { // the second finds nothing to do
		assert.NoError(t, w.Close())
	}
	// Goroutines end a moment after they were waited for.
	if !timelimit.Await(timelimit.Wait, func() bool { return takeStock(t) == before }) {
		t.Errorf("-before +after:\n%s", cmp.Diff(before, takeStock(t)))
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), pod.Path) {
		t.Errorf("%s is still mounted, or %v", pod.Path, err)
	}
	if err := pod.Do(func() error { return nil }); err == nil {
		t.Error("a closed host can be entered")
	}
}
