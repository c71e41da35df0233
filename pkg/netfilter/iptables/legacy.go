// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// legacyInUse reports whether a table of iptables-legacy stands in this network
// namespace. The file lists those that somebody has touched; asking the kernel
// for a table by its socket option would make it. (/proc/net would be about the
// namespace of the process's first thread.)
func legacyInUse(f policy.Family, tableName string) (bool, error) {
	path := "/proc/thread-self/net/ip_tables_names"
	if f == policy.IPv6 {
		path = "/proc/thread-self/net/ip6_tables_names"
	}
	names, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) { // no iptables-legacy in this kernel, or not loaded
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("find the tables of iptables-legacy: %w; run as root", err)
	}
	return slices.Contains(strings.Fields(string(names)), tableName), nil
}

// errNoBlobs tells that this program cannot read the kernel's form of a table:
// its layout is known here for 64-bit processes alone.
var errNoBlobs = errors.New("tables of iptables-legacy are not read directly on 32-bit machines")

// blob is a table of iptables-legacy in the form in which the kernel and its
// tools exchange it (linux/netfilter_ipv4/ip_tables.h, …ipv6/ip6_tables.h).
type blob struct {
	family  policy.Family
	info    []byte // struct ipt_getinfo
	entries []byte // the entries of struct ipt_get_entries
}

// Sizes and places in struct ipt_getinfo and ipt_get_entries, the same for both
// families.
const (
	nameSize    = 32 // XT_TABLE_MAXNAMELEN
	infoSize    = 84
	infoHooks   = 36 // hook_entry[NF_INET_NUMHOOKS], underflow[…] right after
	infoEntries = 76
	infoSizeAt  = 80
	numHooks    = 5
	entriesHead = 40 // sizeof(struct ipt_get_entries)
)

// The socket options IPT_SO_GET_INFO and IPT_SO_GET_ENTRIES, which have the
// same numbers for IPv6.
const (
	getInfo    = 64
	getEntries = 65
)

// readBlob reads a table by getsockopt, without a program and without the lock:
// the kernel replaces tables whole. The table has to be in use already.
func readBlob(f policy.Family, tableName string) (blob, error) {
	const tries = 20
	if strconv.IntSize != 64 {
		return blob{}, errNoBlobs
	}
	domain, level := unix.AF_INET, unix.SOL_IP
	if f == policy.IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	// A datagram socket takes these options too, and needs no CAP_NET_RAW.
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return blob{}, fmt.Errorf("open a socket for table %s: %w", tableName, err)
	}
	defer func() { _ = unix.Close(fd) }()
	for range tries {
		b := blob{family: f, info: request(infoSize, tableName)}
		if err := getsockopt(fd, level, getInfo, b.info); err != nil {
			return blob{}, fmt.Errorf("read table %s of iptables-legacy: IPT_SO_GET_INFO: %w", tableName, err)
		}
		size := binary.NativeEndian.Uint32(b.info[infoSizeAt:])
		reply := request(entriesHead+int(size), tableName)
		binary.NativeEndian.PutUint32(reply[nameSize:], size)
		err := getsockopt(fd, level, getEntries, reply)
		if errors.Is(err, unix.EAGAIN) { // the table has another size by now
			continue
		}
		if err != nil {
			return blob{}, fmt.Errorf("read table %s of iptables-legacy: IPT_SO_GET_ENTRIES: %w", tableName, err)
		}
		b.entries = reply[entriesHead:]
		again := request(infoSize, tableName)
		if err := getsockopt(fd, level, getInfo, again); err == nil && bytes.Equal(again, b.info) {
			return b, nil
		}
	}
	return blob{}, fmt.Errorf("read table %s of iptables-legacy: it changed %d times meanwhile: %w", tableName, tries, unix.EAGAIN)
}

// request returns a buffer of the size that begins with the table's name.
func request(size int, tableName string) []byte {
	b := make([]byte, size)
	copy(b[:nameSize-1], tableName)
	return b
}

// getsockopt fills the buffer, whose beginning is the question.
func getsockopt(fd, level, option int, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
