// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// anyTable is the routing table by which a remote host accepts every address as local. It is not
// the table "local", because that also applies to answers: a host would deliver them to itself.
const anyTable = 100

// end is one end of a wire.
type end struct {
	host      *Host
	device    string
	addresses []netip.Addr
	// pointToPoint addresses share a prefix with the other end's address, which differs in the last
	// bit.
	pointToPoint bool
	// link is set once the veth pair exists.
	link netlink.Link
}

// connect creates a veth pair between two hosts and sets both ends up.
func connect(a, b *end) error {
	attributes := netlink.NewLinkAttrs()
	attributes.Name = a.device
	err := a.host.Netlink.LinkAdd(&netlink.Veth{
		LinkAttrs:     attributes,
		PeerName:      b.device,
		PeerNamespace: netlink.NsFd(b.host.handle),
	})
	if err != nil {
		return fmt.Errorf("connect %s and %s: %w", a.host.Name, b.host.Name, err)
	}
	ends := []*end{a, b}
	for _, step := range []func(*end) error{(*end).up, (*end).awaitCarrier, (*end).addAddresses, (*end).awaitAddresses} {
		for _, e := range ends {
			if err := step(e); err != nil {
				return fmt.Errorf("set up %s of %s: %w", e.device, e.host.Name, err)
			}
		}
	}
	return nil
}

func (e *end) up() error {
	var err error
	if e.link, err = e.host.Netlink.LinkByName(e.device); err != nil {
		return fmt.Errorf("find device: %w", err)
	}
	if slices.ContainsFunc(e.addresses, netip.Addr.IsLinkLocalUnicast) {
		// Otherwise the kernel adds a second link-local address and prefers it.
		if err := e.host.Sysctl("net/ipv6/conf/"+e.device+"/addr_gen_mode", "1"); err != nil {
			return err
		}
	}
	if err := e.host.Netlink.LinkSetUp(e.link); err != nil {
		return fmt.Errorf("set device up: %w", err)
	}
	return nil
}

// awaitCarrier waits until the device transmits. The kernel drops packets for a moment after the
// second end is up; since Linux 6.8 a request for the link's state ends that.
func (e *end) awaitCarrier() error {
	return await("carrier", func() (bool, error) {
		link, err := e.host.Netlink.LinkByIndex(e.link.Attrs().Index)
		if err != nil {
			return false, err
		}
		return link.Attrs().OperState == netlink.OperUp, nil
	})
}

func (e *end) addAddresses() error {
	for _, a := range e.addresses {
		address := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, e.length(a)))}
		if a.Is6() {
			address.Flags = unix.IFA_F_NODAD
		}
		if err := e.host.Netlink.AddrAdd(e.link, address); err != nil {
			return fmt.Errorf("add address %s: %w", a, err)
		}
	}
	return nil
}

// length returns the prefix length: the full length except for point-to-point addresses (RFC 3021,
// RFC 6164) of uplinks.
func (e *end) length(a netip.Addr) int {
	switch {
	case a.Is6() && a.IsLinkLocalUnicast():
		return 64
	case e.pointToPoint:
		return a.BitLen() - 1
	default:
		return a.BitLen()
	}
}

// awaitAddresses waits until the host accepts packets for its IPv6 addresses, which takes a moment
// even without duplicate address detection.
func (e *end) awaitAddresses() error {
	for _, a := range e.addresses {
		err := await("address "+a.String(), func() (bool, error) {
			if a.Is4() || a.IsLinkLocalUnicast() {
				return true, nil
			}
			routes, err := e.host.Netlink.RouteGet(a.AsSlice())
			if err != nil && !errors.Is(err, unix.ENETUNREACH) {
				return false, err
			}
			return len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL, nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// await polls a condition of the kernel.
func await(what string, done func() (bool, error)) error {
	const limit = 5 * time.Second
	for began := time.Now(); ; time.Sleep(200 * time.Microsecond) {
		ok, err := done()
		if err != nil {
			return fmt.Errorf("wait for %s: %w", what, err)
		}
		if ok {
			return nil
		}
		if timelimit.Exceeded(time.Since(began), limit) {
			return fmt.Errorf("wait for %s: not there within %s", what, limit)
		}
	}
}

// route adds a route to the destination through the end: via the gateway or, if that is invalid, on
// link.
func (e *end) route(destination netip.Prefix, gateway netip.Addr) error {
	r := &netlink.Route{LinkIndex: e.link.Attrs().Index, Dst: ipNet(destination)}
	if gateway.IsValid() {
		r.Gw = gateway.AsSlice()
		r.Flags = int(netlink.FLAG_ONLINK)
	} else {
		r.Scope = netlink.SCOPE_LINK
	}
	if err := e.host.Netlink.RouteReplace(r); err != nil {
		return fmt.Errorf("route %s on %s: %w", destination, e.host.Name, err)
	}
	return nil
}

// neighbor adds a permanent neighbor entry for the other end's address.
func (e *end) neighbor(address netip.Addr, other *end) error {
	err := e.host.Netlink.NeighSet(&netlink.Neigh{
		LinkIndex:    e.link.Attrs().Index,
		State:        netlink.NUD_PERMANENT,
		IP:           address.AsSlice(),
		HardwareAddr: other.link.Attrs().HardwareAddr,
	})
	if err != nil {
		return fmt.Errorf("add neighbor %s on %s: %w", address, e.host.Name, err)
	}
	return nil
}

// acceptAny makes the host accept all packets from the end as local. Sockets that answer need
// IP_TRANSPARENT.
func (e *end) acceptAny() error {
	loopback, err := e.host.Netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback interface of %s: %w", e.host.Name, err)
	}
	var errs []error
	for _, everything := range everywhere() {
		family := unix.AF_INET
		if everything.Addr().Is6() {
			family = unix.AF_INET6
		}
		rule := netlink.NewRule()
		rule.Family, rule.IifName, rule.Table, rule.Priority = family, e.device, anyTable, anyTable
		errs = append(errs,
			e.host.Netlink.RouteAdd(&netlink.Route{
				LinkIndex: loopback.Attrs().Index,
				Dst:       ipNet(everything),
				Type:      unix.RTN_LOCAL,
				Scope:     netlink.SCOPE_HOST,
				Table:     anyTable,
			}),
			e.host.Netlink.RuleAdd(rule))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("accept every address on %s: %w", e.host.Name, err)
	}
	return nil
}

// everywhere returns the default route's prefix of each family.
func everywhere() []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// ofFamily returns the first address of the same family whose scope is not link-local.
func ofFamily(addresses []netip.Addr, like netip.Addr) netip.Addr {
	for _, a := range addresses {
		if a.Is4() == like.Is4() && (a.Is4() || !a.IsLinkLocalUnicast()) {
			return a
		}
	}
	return netip.Addr{}
}
