// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Read returns the addresses of global scope without those of Services. It needs no privilege. Beside 3,000
// addresses of Services on kube-ipvs0 it takes 1 ms: the kernel lists them, and they are not decoded.
func Read(families []policy.Family) ([]policy.NodeAddress, error) {
	socket := nfnetlink.NewRouteConn()
	list, err := read(socket, families)
	if err := errors.Join(err, socket.Close()); err != nil {
		return nil, fmt.Errorf("read the node's addresses: %w", err)
	}
	return list, nil
}

func read(socket *nfnetlink.Conn, families []policy.Family) (list []policy.NodeAddress, err error) {
	services, err := socket.Link(0, policy.ServiceInterface)
	if err != nil {
		return nil, err
	}
	links := map[uint32]nfnetlink.Link{}
	for _, family := range families {
		f := nfnetlink.FamilyOf(family.All().Addr())
		all, err := socket.Addresses(f, services.Index)
		if err != nil {
			return nil, err
		}
		for _, a := range all {
			link, known := links[a.Link]
			if !known {
				link, err = socket.Link(a.Link, "")
				if err != nil {
					return nil, err
				}
				links[a.Link] = link
			}
			isGone := link.Name == ""
			if !isGone {
				list = append(list, nodeAddress(f, a, link))
			}
		}
	}
	return list, nil
}

func nodeAddress(f nfnetlink.Family, a nfnetlink.Address, l nfnetlink.Link) policy.NodeAddress {
	const dummy = "dummy"
	const notUsable = unix.IFA_F_TENTATIVE | unix.IFA_F_OPTIMISTIC | unix.IFA_F_DADFAILED
	// The flag has another meaning in IPv6.
	isSecondary := f == nfnetlink.IPv4 && a.Flags&unix.IFA_F_SECONDARY != 0
	isTemporary := f == nfnetlink.IPv6 && a.Flags&unix.IFA_F_TEMPORARY != 0
	return policy.NodeAddress{
		Address:    a.Address,
		Interface:  l.Name,
		Shared:     l.Flags&unix.IFF_LOOPBACK != 0 || l.Kind == dummy,
		Up:         l.Flags&unix.IFF_UP != 0,
		Secondary:  isSecondary,
		Deprecated: a.Flags&unix.IFA_F_DEPRECATED != 0,
		Unusable:   a.Flags&notUsable != 0 || isTemporary,
	}
}
