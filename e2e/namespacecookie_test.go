// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestWithoutNamespaceCookies runs ADD as on kernels before 5.14, which have no SO_NETNS_COOKIE to
// distinguish a network namespace from a later one with the same inode. It checks that ADD uses the
// verification cache only in the initial network namespace, which never ends.
func TestWithoutNamespaceCookies(t *testing.T) {
	for _, f := range backends()[:2] {
		for where, initial := range map[string]bool{"the first namespace": true, "another namespace": false} {
			t.Run(f.name+", "+where, func(t *testing.T) {
				n := newNode(t, f)
				t.Run("ADD", func(t *testing.T) {
					runtime.LockOSThread() // and never unlock it: the thread ends with the test
					disableNamespaceCookies(t)
					if initial {
						must(t, n.Node.Do(simulateInitialNamespace))
					}
					l, conf := inProcessPlugin{node: n}, n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
					for range 2 {
						l.add(t, conf)
					}
					if looked := l.add(t, conf); looked == initial {
						t.Errorf("ADD without changes: read the rules: %t", looked)
					}
					n.alter(t, "-F POSTROUTING", "flush chain ip ip-masq postrouting\n")
					if !l.add(t, conf) { // which repairs the jump
						t.Error("the next ADD did not read the rules")
					}
				})
			})
		}
	}
}

// disableNamespaceCookies makes getsockopt(SO_NETNS_COOKIE) fail for the calling thread, as on an
// older kernel.
func disableNamespaceCookies(t *testing.T) {
	t.Helper()
	low := 4 * uint32(binary.NativeEndian.Uint16([]byte{0, 1})&1) // offset of the low half of a 64-bit argument
	nr, level, option := uint32(0), 24+low, 32+low                // in struct seccomp_data
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	unless := func(value uint32, skip uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value, Jf: skip}
	}
	end := func(action uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
	}
	filter := []unix.SockFilter{
		load(nr), unless(unix.SYS_GETSOCKOPT, 5), load(level), unless(unix.SOL_SOCKET, 3), load(option), unless(unix.SO_NETNS_COOKIE, 1),
		end(unix.SECCOMP_RET_ERRNO | uint32(unix.ENOPROTOOPT)), end(unix.SECCOMP_RET_ALLOW),
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	must(t, unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&program))); errno != 0 {
		t.Fatal(errno)
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(s)
	if _, err := unix.GetsockoptUint64(s, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); !errors.Is(err, unix.ENOPROTOOPT) {
		t.Fatalf("SO_NETNS_COOKIE: %v", err)
	}
}

// simulateInitialNamespace gives the calling thread a /proc/sys/net/core that only the initial
// network namespace has.
func simulateInitialNamespace() error {
	const dir = "/proc/sys/net/core"
	return errors.Join(
		unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS),
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("tmpfs", dir, "tmpfs", 0, ""),
		os.WriteFile(filepath.Join(dir, "dev_weight"), []byte("64\n"), 0o644),
	)
}
