// SPDX-License-Identifier: Apache-2.0

package topology_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// namespace identifies the network namespace of the calling thread.
func namespace(t *testing.T) uint64 {
	t.Helper()
	return inode(t, "/proc/thread-self/ns/net")
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		t.Fatal(err)
	}
	return stat.Ino
}

func TestDo(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	w, pod := world(t, topology.Options{})
	home := namespace(t)

	want := errors.New("mine")
	err := w.Node.Do(func() error {
		if namespace(t) != inode(t, w.Node.Path) {
			t.Error("not on the node")
		}
		if err := pod.Do(func() error {
			if namespace(t) != inode(t, pod.Path) {
				t.Error("not in the pod")
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		if namespace(t) != inode(t, w.Node.Path) {
			t.Error("not back on the node")
		}
		return want
	})
	if !errors.Is(err, want) {
		t.Errorf("got %v, want the function's error", err)
	}
	func() {
		defer func() { _ = recover() }()
		_ = pod.Do(func() error { panic("mine") })
	}()
	if namespace(t) != home {
		t.Error("not back home")
	}
}

func TestCommand(t *testing.T) {
	w, pod := world(t, topology.Options{})
	for _, h := range []*topology.Host{w.Node, w.LAN, pod} {
		output, err := h.Command(t.Context(), "stat", "-L", "-c", "%i", "/proc/self/ns/net", h.Path).Output()
		if err != nil {
			t.Fatal(err)
		}
		if lines := strings.Fields(string(output)); len(lines) != 2 || lines[0] != lines[1] {
			t.Errorf("%s: the program is in %s, the host's namespace is %s", h.Name, lines[0], lines[1])
		}
	}
	_, err := pod.Command(t.Context(), "sh", "-c", "echo why >&2; exit 3").Output()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 3 || string(exit.Stderr) != "why\n" {
		t.Errorf("got %#v, want exit code 3 and the message", err)
	}
	output, err := pod.Command(t.Context(), "sh", "-c", "echo out; echo err >&2").CombinedOutput()
	if err != nil || string(output) != "out\nerr\n" {
		t.Errorf("got %q, %v", output, err)
	}
	if err := pod.Command(t.Context(), "no-such-program").Run(); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("got %v, want %v", err, exec.ErrNotFound)
	}
}

func TestProgramsEndWithTheHost(t *testing.T) {
	_, pod := world(t, topology.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	command := pod.Command(ctx, "sleep", "60")
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	if err := pod.Close(); err != nil {
		t.Fatal(err)
	}
	_ = command.Wait()
	if status := command.ProcessState.Sys().(syscall.WaitStatus); status.Signal() != unix.SIGKILL || ctx.Err() != nil {
		t.Errorf("ended by %v, %v; want the kernel to kill it at once", status.Signal(), ctx.Err())
	}
}

func TestFlushConntrack(t *testing.T) {
	w, _ := world(t, topology.Options{})
	count := func() int {
		var flows []*netlink.ConntrackFlow
		if err := w.Node.Do(func() (err error) {
			flows, err = netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return len(flows)
	}
	forward := netlink.IPTuple{
		SrcIP: net.IPv4(10, 0, 0, 1).To4(), DstIP: net.IPv4(10, 0, 0, 2).To4(), Protocol: unix.IPPROTO_UDP, SrcPort: 1, DstPort: 2,
	}
	reverse := netlink.IPTuple{
		SrcIP: forward.DstIP, DstIP: forward.SrcIP, Protocol: unix.IPPROTO_UDP, SrcPort: 2, DstPort: 1,
	}
	if err := w.Node.Do(func() error {
		return netlink.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, &netlink.ConntrackFlow{
			FamilyType: unix.AF_INET, Forward: forward, Reverse: reverse, TimeOut: 60,
		})
	}); err != nil {
		t.Fatal(err)
	}
	before := count()
	if err := w.Node.FlushConntrack(); err != nil {
		t.Fatal(err)
	}
	if after := count(); before != 1 || after != 0 {
		t.Errorf("%d connections before, %d after; want 1 and 0", before, after)
	}
}

func TestTopologiesAreApart(t *testing.T) {
	_, a := world(t, topology.Options{})
	_, b := world(t, topology.Options{})
	if a.Path == b.Path {
		t.Fatalf("both pods are %s", a.Path)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	topology.Must(b.SendTCP(echo("1.2.3.4")))(t)
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
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		return len(names)
	}
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
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
	w, err := topology.Build(topology.Options{})
	if err != nil {
		t.Fatal(err)
	}
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
	after := takeStock(t)
	for deadline := time.Now().Add(2 * time.Second); after != before && time.Now().Before(deadline); after = takeStock(t) {
		time.Sleep(time.Millisecond) // goroutines end a moment after they were waited for
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("-before +after:\n%s", diff)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), pod.Path) {
		t.Errorf("%s is still mounted, or %v", pod.Path, err)
	}
	if err := pod.Do(func() error { return nil }); err == nil {
		t.Error("a closed host can be entered")
	}
}

// TestAdopt checks that an existing network namespace sends as a host and remains
// when the host is closed.
func TestAdopt(t *testing.T) {
	world := topology.New(t, topology.Options{})
	address := netip.MustParseAddr("10.244.7.7")
	pod := topology.Must(world.AddPod("theirs", address))(t)
	adopted := topology.Must(world.Adopt("adopted", pod.Path))(t)
	sees := func(send func(netip.AddrPort, ...topology.Option) (topology.Seen, error)) {
		seen := topology.Must(send(netip.MustParseAddrPort("198.51.100.1:7")))(t)
		if seen.By != "outside" || seen.Source.Addr() != address {
			t.Errorf("seen %+v, want %s", seen, address)
		}
	}
	sees(adopted.SendUDP)
	sees(adopted.SendTCP)
	if err := adopted.Close(); err != nil {
		t.Fatal(err)
	}
	sees(pod.SendUDP) // not TCP: the two begin with the same port, whose connection lingers
	if _, err := world.Adopt("nothing", "/run/netns/nothing"); err == nil {
		t.Error("a namespace that is not there was adopted")
	}
}
