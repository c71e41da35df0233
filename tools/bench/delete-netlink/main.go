// SPDX-License-Identifier: Apache-2.0

// Command delete-netlink deletes the masqueraded conntrack entries to the prefix in PREFIX with
// github.com/vishvananda/netlink, which dumps the whole table and deletes each entry by a request.
package main

import (
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// masqueraded matches entries to the prefix whose replies go to another address than their source.
type masqueraded struct{ netip.Prefix }

func (m masqueraded) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	to, ok := netip.AddrFromSlice(f.Forward.DstIP)
	return ok && m.Contains(to.Unmap()) && !f.Reverse.DstIP.Equal(f.Forward.SrcIP)
}

func main() { os.Exit(run()) }

func run() int {
	prefix, err := netip.ParsePrefix(os.Getenv("PREFIX"))
	if err == nil {
		_, err = netlink.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, masqueraded{prefix})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "delete-netlink:", err)
		return 1
	}
	return 0
}
