// SPDX-License-Identifier: Apache-2.0

package topology_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var stat unix.Stat_t
	topology.NoError(t, unix.Stat(path, &stat))
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
		names := topology.Must(filepath.Glob(pattern))(t)
		return len(names)
	}
	links := topology.Must(net.Interfaces())(t)
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
	w := topology.Must(topology.Build(topology.Options{}))(t)
	pod := topology.Must(w.AddPod("pod", addr("10.0.0.2")))(t)
	topology.Must(w.NewPod("bare"))(t)
	conn := topology.Must(pod.OpenTCP(echo("1.2.3.4")))(t)
	if during := takeStock(t); during.Hosts != before.Hosts+5 || during.MainThread != before.MainThread {
		t.Errorf("5 hosts were made: from %+v to %+v", before, during)
	}
	if _, err := w.AddPod("pod", addr("10.0.0.3")); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second pod of that name: got %v, want %v", err, os.ErrExist)
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	for range 2 { // the second finds nothing to do
		if err := w.Close(); err != nil {
			t.Error(err)
		}
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
