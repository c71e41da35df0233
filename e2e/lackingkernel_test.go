// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
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
	memory, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", request.pid), os.O_RDWR, 0)
	if err != nil {
		return 0 // the process was killed
	}
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

// TestLackingKernel runs ADD, STATUS and the reconciler on kernels that lack a part. It checks that what
// can work does, and that the errors name the part and the remedy.
func TestLackingKernel(t *testing.T) {
	t.Parallel()
	xt := []string{"addrtype", "comment", "statistic", "MASQUERADE"}
	noTables := []string{"backend unusable", "the kernel needs nf_tables", "try: modprobe nf_tables"}
	denied := missing{denied: []string{"/run/xtables.lock"}}
	both := object{"enableIPv6": true}
	for _, c := range []struct {
		name    string
		lacks   missing
		backend string
		keys    object
		says    []string // by STATUS, ADD and the reconciler; nil: they succeed
	}{
		{"nf_tables", missing{nfTables: true}, "nftables", nil, noTables},
		{"nf_tables", missing{nfTables: true}, "iptables-nft", nil, []string{"nft_compat", "iptables-legacy"}},
		{"nf_tables", missing{nfTables: true}, "iptables-legacy", nil, nil},
		{"nfnetlink", missing{nfnetlink: true}, "nftables", nil, noTables},
		{"nfnetlink", missing{nfnetlink: true}, "iptables-nft", nil, []string{"nft_compat", "iptables-legacy"}},
		{"nfnetlink", missing{nfnetlink: true}, "iptables-legacy", nil, nil},
		{"nft_fib", missing{names: []string{"fib"}}, "nftables", nil, []string{"CONFIG_NFT_FIB_IPV4", "try: modprobe nft_fib_ipv4, or set backend to iptables"}},
		{"nft_fib", missing{names: []string{"fib"}}, "iptables-nft", nil, nil},
		{"nft_masq", missing{names: []string{"masq"}}, "nftables", nil, []string{"CONFIG_NFT_MASQ", "try: modprobe nft_masq, or set backend to iptables"}},
		{"nft_chain_nat", missing{names: []string{"nat"}}, "nftables", nil, []string{"CONFIG_NFT_NAT", "try: modprobe nft_chain_nat, or set backend to iptables"}},
		{"nft_chain_nat", missing{names: []string{"nat"}}, "iptables-nft", nil, []string{"CONFIG_NFT_NAT", "modprobe nft_chain_nat"}},
		{"nft_chain_nat", missing{names: []string{"nat"}}, "iptables-legacy", nil, nil},
		{"xt", missing{names: xt}, "nftables", nil, nil},
		{"xt", missing{names: xt}, "iptables-nft", nil, []string{"modprobe -a xt_addrtype", "set backend to nftables"}},
		{"ip_tables", missing{xtables: true}, "iptables-nft", nil, nil},
		{"ip_tables", missing{xtables: true}, "iptables-legacy", nil, []string{"iptable_nat", "set backend to nftables"}},
		{"IPv6", missing{inet6: true}, "nftables", nil, nil},
		{"IPv6", missing{inet6: true}, "iptables-nft", nil, nil},
		{"IPv6", missing{inet6: true}, "iptables-legacy", nil, nil},
		{"IPv6, enabled", missing{inet6: true}, "nftables", both, nil},
		{"IPv6, enabled", missing{inet6: true}, "iptables-nft", both, nil},
		{"IPv6, enabled", missing{inet6: true}, "iptables-legacy", both, []string{"the kernel has no IPv6 (ipv6.disable=1)", "set enableIPv6 to false"}},
		{"xtables.lock by SELinux", denied, "iptables-legacy", nil, []string{"/run/xtables.lock: Permission denied", "SELinux"}},
		{"xtables.lock by SELinux", denied, "nftables", nil, nil},
	} {
		for _, b := range backends() {
			if b.name != c.backend {
				continue
			}
			t.Run(c.name+", "+b.name, func(t *testing.T) {
				n := newNode(t, b)
				n.lacks(t, c.lacks)
				keys := object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}
				maps.Copy(keys, c.keys)
				conf := n.conf(t, "podnet", keys)
				if c.says == nil {
					n.addAndCheck(t, conf).noWarnings(t)
					n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
					n.wantSays(t, 0, nil, "once")
					return
				}
				n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, c.says...)
				for range 2 {
					a := n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 100, c.says...)
					if strings.Count(a.msg, "the kernel needs") > 1 || strings.Count(a.msg, "backend unusable") > 1 {
						t.Errorf("the message says it twice: %s", a.msg)
					}
				}
				n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0)
				n.conflist(t, "podnet", keys)
				n.wantSays(t, 1, c.says, "once")
				if out := n.wantSays(t, 0, c.says, "doctor"); strings.Contains(out, "ip-masq-reconciler once") {
					t.Errorf("doctor recommends once:\n%s", out)
				}
			})
		}
	}
}

// TestAutoOnLackingKernel checks which backend auto chooses where the program called iptables is of a variant
// without a side in the kernel.
func TestAutoOnLackingKernel(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		lacks missing
		plain string // the variant of the program called iptables; the other one is installed, too
		want  string
	}{
		"no nf_tables": {missing{nfTables: true}, "nft", "iptables legacy"},
		"RHEL 10":      {missing{xtables: true}, "legacy", "nftables"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, backends()[0])
			n.path = n.linkBothVariants(t, c.plain)
			n.lacks(t, c.lacks)
			conf := n.conf(t, "podnet", object{"backend": "auto"})
			for range 2 {
				n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
				n.addAndCheck(t, conf)
				n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 "+c.want)
			}
		})
	}
}

// TestDeniedDirectories checks what the programs say of directories that root is not allowed to open, as by
// SELinux.
func TestDeniedDirectories(t *testing.T) {
	t.Parallel()
	says := []string{"permission denied to root", "SELinux", "ausearch -m avc"}
	t.Run("dataDir", func(t *testing.T) {
		n := newNode(t, backends()[0])
		conf := n.conf(t, "podnet", nil)
		n.addAndCheck(t, conf)
		n.lacks(t, missing{denied: []string{n.dataDir}})
		n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, says...)
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 100, says...)
		n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 101, says...)
		if d := n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0); !strings.Contains(d.stderr, "SELinux") {
			t.Errorf("DEL does not warn: %s", d.stderr)
		}
		n.wantSays(t, 1, says, "once")
	})
	t.Run("conflists", func(t *testing.T) {
		n := newNode(t, backends()[0])
		n.conflist(t, "podnet", nil)
		n.lacks(t, missing{denied: []string{filepath.Join(n.dir, "net.d")}})
		n.wantSays(t, 1, says, "once")
	})
}

// wantSays runs a command of the reconciler, checks its exit code and output, and returns the output.
func (n *node) wantSays(t *testing.T, want int, says []string, args ...string) string {
	t.Helper()
	stdout, stderr, code := n.reconciler(t, args...)
	if code != want {
		t.Errorf("%s: exit code %d, want %d\n%s%s", args[0], code, want, stdout, stderr)
	}
	for _, s := range says {
		if !strings.Contains(stdout+stderr, s) {
			t.Errorf("%s lacks %q:\n%s%s", args[0], s, stdout, stderr)
		}
	}
	return stdout + stderr
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

// TestModulesDisabled checks that no error recommends modprobe on a node that forbids to load modules.
func TestModulesDisabled(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		backend int
		lacks   missing
		part    string
	}{
		{0, missing{names: []string{"masq"}}, "CONFIG_NFT_MASQ"},
		{0, missing{nfnetlink: true}, "CONFIG_NF_TABLES"},
		{1, missing{names: []string{"nat"}}, "CONFIG_NFT_NAT"},
		{1, missing{names: []string{"addrtype"}}, "xt_addrtype"},
		{1, missing{nfTables: true}, "CONFIG_NFT_COMPAT"},
		{2, missing{xtables: true}, "iptable_nat"},
	} {
		b := backends()[c.backend]
		t.Run(b.name+", "+c.part, func(t *testing.T) {
			n := newNode(t, b)
			n.lacks(t, c.lacks)
			// A kernel that is built without modules does not have the file, so the directory is replaced.
			n.sysctls(t, "/proc/sys/kernel", []string{"random"}, map[string]string{"modules_disabled": "1\n"})
			a := n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", nil)}).want(t, 100, c.part, "kernel.modules_disabled", "/etc/modules-load.d", "reboot")
			if strings.Contains(a.msg, "modprobe") {
				t.Errorf("the message recommends modprobe: %s", a.msg)
			}
		})
	}
}

// TestGuardOnLackingKernel checks that a guard that the kernel cannot have fails no ADD, is no difference
// for CHECK, and that the ADD and `status` name what is missing.
func TestGuardOnLackingKernel(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		lacks    missing
		backends []backend
	}{
		"nft_fib":   {missing{names: []string{"fib"}}, backends()[1:]},
		"nft_ct":    {missing{names: []string{"ct"}}, backends()},
		"nf_tables": {missing{nfTables: true}, backends()[2:]},
	} {
		for _, b := range c.backends {
			t.Run(name+", "+b.name, func(t *testing.T) {
				n := newNode(t, b)
				n.lacks(t, c.lacks)
				conf := n.conf(t, "podnet", object{"guard": "drop", "enforceExempt": true, "podCIDRs": []string{"10.1.0.0/16"}})
				const has = "guard and enforceExempt have no effect"
				n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, has, "CONFIG_NF", "modprobe")
				for range 2 {
					n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
					n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
					n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
				}
				n.wantSays(t, 0, []string{has}, "once")
				n.wantSays(t, 1, []string{"the rules are right", "guard-inactive"}, "status") // 1: no reconciler runs
				if out := n.wantSays(t, 0, []string{"guard-inactive", "CONFIG_NF"}, "doctor"); strings.Contains(out, "State the addresses of pods") {
					t.Errorf("doctor recommends podCIDRs:\n%s", out)
				}
				n.wantSays(t, 0, nil, "check")
			})
		}
	}
}

// TestRootless runs the plugin as root of a user namespace that does not own the node's network namespace,
// as in a container without privileges.
func TestRootless(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", nil)
		unprivileged := func(verb string) result {
			return n.invoke(t, invocation{verb: verb, conf: conf, unprivileged: true})
		}
		says := []string{"operation not permitted", "CAP_NET_ADMIN over the network namespace"}
		unprivileged("STATUS").want(t, 50, says...)
		unprivileged("ADD").want(t, 100, says...)
		unprivileged("DEL").want(t, 0)
		n.addAndCheck(t, conf) // with privileges
		unprivileged("CHECK").want(t, 101, says...)
	})
}

// TestReconcilerOnLackingKernel checks that a reconciler that runs is not ready for reason backend, and that
// the probe and `status` name what is missing.
func TestReconcilerOnLackingKernel(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.lacks(t, missing{names: []string{"masq"}})
	n.agentFile(t, "ip-masq.yaml", "nonMasqueradeCIDRs: [10.0.0.0/8]\n")
	d := n.startReconciler(t)
	d.eventuallyUnready(t, "backend", "CONFIG_NFT_MASQ", "modprobe nft_masq")
	n.wantSays(t, 3, []string{"backend:", "CONFIG_NFT_MASQ"}, "status")
}

// TestReconcilerWithoutIPv6 checks that a reconciler repairs the rules of IPv4 on a kernel without IPv6.
func TestReconcilerWithoutIPv6(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.lacks(t, missing{inet6: true})
		n.conflist(t, "podnet", object{"guard": "drop", "podCIDRs": []string{"10.1.0.0/16"}})
		d := n.startReconciler(t, "--resync-interval", "1s").untilReady(t)
		right := n.ruleset(t)
		n.flushMasqChain(t)
		d.until(t, "repair", func() bool { return n.ruleset(t) == right })
		n.wantSays(t, 0, []string{"no problems"}, "status")
	})
}
