// SPDX-License-Identifier: Apache-2.0

// Command plugin-legacy-table is a chained CNI plugin that reads table nat of iptables-legacy once
// and ignores it. That is the minimum cost of verifying rules: the kernel returns only
// whole tables (IPT_SO_GET_ENTRIES of linux/netfilter_ipv4/ip_tables.h).
package main

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chained"
)

func main() { chained.Main("plugin-legacy-table", table) }

// table requests the size of table nat and then the table.
func table() error {
	const (
		getInfo, getEntries = 64, 65 // IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES
		infoSize, sizeAt    = 84, 80 // struct ipt_getinfo and the size in it
		head, headSizeAt    = 40, 32 // struct ipt_get_entries before the entries
	)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }() // nothing was written
	ask := func(option int, b []byte) error {
		copy(b, "nat")
		size := uint32(len(b))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_IP, uintptr(option),
			uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
		if errno != 0 {
			return fmt.Errorf("read table nat of iptables-legacy: %w", errno)
		}
		return nil
	}
	info := make([]byte, infoSize)
	if err := ask(getInfo, info); err != nil {
		return err
	}
	size := binary.NativeEndian.Uint32(info[sizeAt:])
	entries := make([]byte, head+int(size))
	binary.NativeEndian.PutUint32(entries[headSizeAt:], size)
	return ask(getEntries, entries)
}
