// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Read returns the addresses of global scope without those of Services. It needs no privilege.
func Read(families []policy.Family) (list []policy.NodeAddress, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("read the node's addresses: %w", err)
		}
	}()
	socket := nfnetlink.Routes()
	defer func() { err = errors.Join(err, socket.Close()) }()
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
			if _, known := links[a.Link]; !known {
				if links[a.Link], err = socket.Link(a.Link, ""); err != nil {
					return nil, err
				}
			}
			if link := links[a.Link]; link.Name != "" { // else it is gone
				list = append(list, nodeAddress(f, a, link))
			}
		}
	}
	return list, nil
}

func nodeAddress(f nfnetlink.Family, a nfnetlink.Address, l nfnetlink.Link) policy.NodeAddress {
	const dummy = "dummy"
	has := func(flags uint32) bool { return a.Flags&flags != 0 }
	secondary := has(unix.IFA_F_SECONDARY) // of IPv6 it is IFA_F_TEMPORARY
	return policy.NodeAddress{
		Address: a.Address, Interface: l.Name, Shared: l.Flags&unix.IFF_LOOPBACK != 0 || l.Kind == dummy, Up: l.Flags&unix.IFF_UP != 0,
		Secondary: secondary && f == nfnetlink.IPv4, Deprecated: has(unix.IFA_F_DEPRECATED),
		Unusable: has(unix.IFA_F_TENTATIVE|unix.IFA_F_OPTIMISTIC|unix.IFA_F_DADFAILED) || secondary && f == nfnetlink.IPv6,
	}
}
