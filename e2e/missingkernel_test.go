// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// missing is a part of the kernel that the programs of a node do not find. A supervisor (seccomp
// user notifications) changes what the programs ask for, so that the answer is the kernel's own: a
// name that no module has, or a subsystem of nfnetlink that does not exist.
type missing struct {
	// names are the names of expressions, of xt matches and targets, and of chain types.
	names []string
	// nfTables takes the subsystem nf_tables of nfnetlink away.
	nfTables bool
	// nfnetlink takes NETLINK_NETFILTER away.
	nfnetlink bool
	// xtables takes ip_tables and ip6_tables away, which iptables-legacy needs.
	xtables bool
	// inet6 takes the sockets and the sysctls of IPv6 away.
	inet6 bool
	// cookies takes SO_NETNS_COOKIE away.
	cookies bool
	// denied are the paths of files and directories that cannot be opened, as by SELinux.
	denied []string
}

// Layouts of struct seccomp_notif and struct seccomp_notif_resp.
type (
	notification struct {
		id         uint64
		pid, flags uint32
		nr         int32
		arch       uint32
		_          uint64
		args       [6]uint64
	}
	notificationReply struct {
		id    uint64
		value int64
		errno int32
		flags uint32
	}
)

// lacks starts the node's programs from now on as on a kernel that lacks these parts.
func (n *node) lacks(t *testing.T, l missing) {
	t.Helper()
	var listener int
	if l.inet6 { // as with ipv6.disable=1
		n.sysctls(t, "/proc/sys/net", []string{"core", "ipv4", "netfilter"}, nil)
	}
	must(t, n.Node.Enclose(func() (err error) {
		listener, err = l.install()
		return err
	}))
	stop, done := make(chan struct{}), make(chan error)
	go func() { done <- l.supervise(listener, stop) }()
	t.Cleanup(func() {
		close(stop)
		must(t, errors.Join(<-done, unix.Close(listener)))
	})
}

// install adds the filter to the calling thread and to the processes that it starts. It returns the
// file descriptor of the notifications.
func (l missing) install() (listener int, err error) {
	low := 4 * uint32(binary.NativeEndian.Uint16([]byte{0, 1})&1) // offset of the low half of a 64-bit argument
	argument := func(i uint32) uint32 { return 16 + 8*i + low }   // in struct seccomp_data
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	end := func(action uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
	}
	filter := []unix.SockFilter{load(0)}
	// when adds: if the call has these arguments, then the action.
	when := func(call, action uint32, arguments ...[2]uint32) {
		block := []unix.SockFilter{end(action), load(0)}
		for i := len(arguments) - 1; i >= 0; i-- {
			block = append([]unix.SockFilter{load(argument(arguments[i][0])),
				{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: arguments[i][1], Jf: uint8(len(block) - 1)}}, block...)
		}
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: call, Jf: uint8(len(block))})
		filter = append(filter, block...)
	}
	refuse := func(err unix.Errno) uint32 { return unix.SECCOMP_RET_ERRNO | uint32(err) }
	if l.nfnetlink {
		when(unix.SYS_SOCKET, refuse(unix.EPROTONOSUPPORT), [2]uint32{0, unix.AF_NETLINK}, [2]uint32{2, unix.NETLINK_NETFILTER})
	}
	if l.inet6 {
		when(unix.SYS_SOCKET, refuse(unix.EAFNOSUPPORT), [2]uint32{0, unix.AF_INET6})
	}
	if l.cookies {
		when(unix.SYS_GETSOCKOPT, refuse(unix.ENOPROTOOPT), [2]uint32{1, unix.SOL_SOCKET}, [2]uint32{2, unix.SO_NETNS_COOKIE})
	}
	if l.xtables {
		const base, last = 64, 68 // IPT_BASE_CTL and the last option after it
		for option := uint32(base); option <= last; option++ {
			for _, level := range []uint32{unix.SOL_IP, unix.SOL_IPV6} {
				when(unix.SYS_GETSOCKOPT, refuse(unix.ENOPROTOOPT), [2]uint32{1, level}, [2]uint32{2, option})
			}
		}
	}
	if len(l.names) > 0 || l.nfTables {
		when(unix.SYS_WRITE, unix.SECCOMP_RET_USER_NOTIF)
		when(unix.SYS_SENDTO, unix.SECCOMP_RET_USER_NOTIF)
		when(unix.SYS_SENDMSG, unix.SECCOMP_RET_USER_NOTIF)
	}
	if len(l.denied) > 0 {
		when(unix.SYS_OPENAT, unix.SECCOMP_RET_USER_NOTIF)
	}
	filter = append(filter, end(unix.SECCOMP_RET_ALLOW))
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return -1, err
	}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return -1, fmt.Errorf("seccomp: %w", errno)
	}
	return int(fd), nil
}

// supervise answers notifications until stop.
func (l missing) supervise(listener int, stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		ready := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
		if n, err := unix.Poll(ready, 50); n == 0 || err != nil || ready[0].Revents&unix.POLLIN == 0 {
			continue
		}
		var request notification
		if errno := control(listener, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&request)); errno == unix.ENOENT || errno == unix.EINTR {
			continue // the process was killed
		} else if errno != 0 {
			return fmt.Errorf("receive a notification: %w", errno)
		}
		reply := notificationReply{id: request.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
		if errno := l.handle(&request); errno != 0 {
			reply.flags, reply.errno = 0, -int32(errno)
		}
		if errno := control(listener, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&reply)); errno != 0 && errno != unix.ENOENT {
			return fmt.Errorf("answer a notification: %w", errno)
		}
	}
}

func control(fd int, request uint, argument unsafe.Pointer) unix.Errno {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(argument))
	return errno
}

// handle changes what a program sends, or returns the error of what it must not open.
func (l missing) handle(request *notification) unix.Errno {
	// os.OpenFile waits for the lock of the test's log, which a thread that is supervised may hold while it writes.
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/mem", request.pid), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0 // the process was killed
	}
	memory := os.NewFile(uintptr(fd), "memory")
	defer memory.Close()
	switch request.nr {
	case unix.SYS_SENDTO, unix.SYS_WRITE:
		l.edit(memory, request.args[1], request.args[2])
	case unix.SYS_SENDMSG:
		header := make([]byte, 32) // of struct msghdr: the list of buffers is at 16, its length at 24
		_, _ = memory.ReadAt(header, int64(request.args[1]))
		buffers := make([]byte, 16*min(binary.NativeEndian.Uint64(header[24:]), 1024))
		_, _ = memory.ReadAt(buffers, int64(binary.NativeEndian.Uint64(header[16:])))
		for ; len(buffers) > 0; buffers = buffers[16:] {
			l.edit(memory, binary.NativeEndian.Uint64(buffers), binary.NativeEndian.Uint64(buffers[8:]))
		}
	case unix.SYS_OPENAT:
		text := make([]byte, unix.PathMax)
		n, _ := memory.ReadAt(text, int64(request.args[1]))
		path, _, _ := strings.Cut(string(text[:n]), "\x00")
		for _, denied := range l.denied {
			if path == denied || strings.HasPrefix(path, denied+"/") {
				return unix.EACCES
			}
		}
	}
	return 0
}

// edit changes the messages in a buffer that a program is about to send.
func (l missing) edit(memory *os.File, at, size uint64) {
	const (
		header     = 16       // bytes of struct nlmsghdr
		nfTables   = 10       // NFNL_SUBSYS_NFTABLES
		none       = 14       // no subsystem
		batchBegin = 0x10     // NFNL_MSG_BATCH_BEGIN; the subsystem is in its res_id
		limit      = 64 << 20 // bytes
	)
	data := make([]byte, min(size, limit))
	if n, err := memory.ReadAt(data, int64(at)); err != nil || n != len(data) {
		return
	}
	set := func(offset int, b ...byte) { _, _ = memory.WriteAt(b, int64(at)+int64(offset)) }
	for offset := 0; l.nfTables && offset+header+4 <= len(data); {
		length, kind := int(binary.NativeEndian.Uint32(data[offset:])), binary.NativeEndian.Uint16(data[offset+4:])
		if length < header || offset+length > len(data) {
			break
		}
		if kind>>8 == nfTables {
			set(offset+4, binary.NativeEndian.AppendUint16(nil, none<<8|kind&0xff)...)
		} else if kind == batchBegin && binary.BigEndian.Uint16(data[offset+header+2:]) == nfTables {
			set(offset+header+2, 0, none)
		}
		offset += (length + 3) &^ 3
	}
	for _, name := range l.names {
		for _, attribute := range []uint16{1, 7} { // NFTA_EXPR_NAME, NFTA_MATCH_NAME, NFTA_TARGET_NAME, NFTA_COMPAT_NAME; NFTA_CHAIN_TYPE
			if name == "nat" && attribute == 1 {
				continue // the name of a table
			}
			pattern := binary.NativeEndian.AppendUint16(nil, uint16(4+len(name)+1))
			pattern = append(binary.NativeEndian.AppendUint16(pattern, attribute), name+"\x00"...)
			for from := 0; ; {
				i := bytes.Index(data[from:], pattern)
				if i < 0 {
					break
				}
				from += i + len(pattern)
				set(from-2, '?')
			}
		}
	}
}

// sysctls replaces a directory of sysctls by one with some of its entries, and with files.
func (n *node) sysctls(t *testing.T, dir string, entries []string, files map[string]string) {
	t.Helper()
	own := filepath.Join(n.dir, "sysctls")
	for _, e := range entries {
		must(t, os.MkdirAll(filepath.Join(own, e), 0o755))
	}
	for name, text := range files {
		must(t, os.WriteFile(filepath.Join(own, name), []byte(text), 0o644))
	}
	must(t, n.Node.Enclose(func() error {
		var errs []error
		for _, e := range entries {
			errs = append(errs, unix.Mount(filepath.Join(dir, e), filepath.Join(own, e), "", unix.MS_BIND, ""))
		}
		return errors.Join(append(errs, unix.Mount(own, dir, "", unix.MS_BIND|unix.MS_REC, ""))...)
	}))
}
