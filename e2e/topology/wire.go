// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
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
func connect(t T, a, b *end) {
	attributes := netlink.NewLinkAttrs()
	attributes.Name = a.device
	assert.NoError(t, a.host.Netlink.LinkAdd(&netlink.Veth{
		LinkAttrs:     attributes,
		PeerName:      b.device,
		PeerNamespace: netlink.NsFd(b.host.handle),
	}))
	for _, step := range []func(*end, T){(*end).up, (*end).awaitCarrier, (*end).addAddresses, (*end).awaitAddresses} {
		step(a, t)
		step(b, t)
	}
}

func (e *end) up(t T) {
	e.link = assert.Must(e.host.Netlink.LinkByName(e.device))(t)
	if slices.ContainsFunc(e.addresses, netip.Addr.IsLinkLocalUnicast) {
		// Otherwise the kernel adds a second link-local address and prefers it.
		assert.NoError(t, e.host.Sysctl("net/ipv6/conf/"+e.device+"/addr_gen_mode", "1"))
	}
	assert.NoError(t, e.host.Netlink.LinkSetUp(e.link))
}

// awaitCarrier waits until the device transmits. The kernel drops packets for a moment after the
// second end is up; since Linux 6.8 a request for the link's state ends that.
func (e *end) awaitCarrier(t T) {
	await(t, "carrier of "+e.host.Name, func() bool {
		link := assert.Must(e.host.Netlink.LinkByIndex(e.link.Attrs().Index))(t)
		return link.Attrs().OperState == netlink.OperUp
	})
}

func (e *end) addAddresses(t T) {
	for _, a := range e.addresses {
		address := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, e.length(a)))}
		if a.Is6() {
			address.Flags = unix.IFA_F_NODAD
		}
		assert.NoError(t, e.host.Netlink.AddrAdd(e.link, address))
	}
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
func (e *end) awaitAddresses(t T) {
	for _, a := range e.addresses {
		if a.Is4() || a.IsLinkLocalUnicast() {
			continue
		}
		await(t, "address "+a.String(), func() bool {
			routes, err := e.host.Netlink.RouteGet(a.AsSlice())
			if !errors.Is(err, unix.ENETUNREACH) {
				assert.NoError(t, err)
			}
			return len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
		})
	}
}

// await polls a condition of the kernel.
func await(t T, what string, done func() bool) {
	const limit = 5 * time.Second
	for began := time.Now(); !done(); time.Sleep(200 * time.Microsecond) {
		if timelimit.Exceeded(time.Since(began), limit) {
			t.Fatalf("wait for %s: not there within %s", what, limit)
		}
	}
}

// route adds a route to the destination through the end: via the gateway or, if that is invalid, on
// link.
func (e *end) route(t T, destination netip.Prefix, gateway netip.Addr) {
	t.Helper()
	r := &netlink.Route{LinkIndex: e.link.Attrs().Index, Dst: ipNet(destination)}
	if gateway.IsValid() {
		r.Gw = gateway.AsSlice()
		r.Flags = int(netlink.FLAG_ONLINK)
	} else {
		r.Scope = netlink.SCOPE_LINK
	}
	assert.NoError(t, e.host.Netlink.RouteReplace(r))
}

// neighbor adds a permanent neighbor entry for the other end's address.
func (e *end) neighbor(t T, address netip.Addr, other *end) {
	t.Helper()
	assert.NoError(t, e.host.Netlink.NeighSet(&netlink.Neigh{
		LinkIndex:    e.link.Attrs().Index,
		State:        netlink.NUD_PERMANENT,
		IP:           address.AsSlice(),
		HardwareAddr: other.link.Attrs().HardwareAddr,
	}))
}

// acceptAny makes the host accept all packets from the end as local. Sockets that answer need
// IP_TRANSPARENT.
func (e *end) acceptAny(t T) {
	loopback := assert.Must(e.host.Netlink.LinkByName("lo"))(t)
	for _, everything := range everywhere() {
		family := unix.AF_INET
		if everything.Addr().Is6() {
			family = unix.AF_INET6
		}
		rule := netlink.NewRule()
		rule.Family, rule.IifName, rule.Table, rule.Priority = family, e.device, anyTable, anyTable
		assert.NoError(t, e.host.Netlink.RouteAdd(&netlink.Route{
			LinkIndex: loopback.Attrs().Index,
			Dst:       ipNet(everything),
			Type:      unix.RTN_LOCAL,
			Scope:     netlink.SCOPE_HOST,
			Table:     anyTable,
		}))
		assert.NoError(t, e.host.Netlink.RuleAdd(rule))
	}
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
