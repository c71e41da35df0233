// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// podNetwork is the prefix of all pods, with a /24 for each node.
func podNetwork() netip.Prefix { return netip.MustParsePrefix("10.244.0.0/16") }

// controlAddress and nodeAddress are addresses of the LAN's private range, which is exempt.
func controlAddress() netip.Addr { return netip.MustParseAddr("192.168.100.2") }

func nodeAddress(number int) netip.Addr {
	return netip.AddrFrom4([4]byte{192, 168, 100, byte(10 + number)})
}

func nodePods(number int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(number), 0}), 24)
}

// nodes6, podNetwork6 and services6 are the IPv6 prefixes of a dual-stack cluster.
func nodes6() netip.Prefix      { return netip.MustParsePrefix("fd00:100::/64") }
func podNetwork6() netip.Prefix { return netip.MustParsePrefix("fd00:244::/48") }
func services6() netip.Prefix   { return netip.MustParsePrefix("fd00:96::/112") }

func nodeAddress6(number int) netip.Addr {
	address := nodes6().Addr().As16()
	address[15] = byte(10 + number)
	return netip.AddrFrom16(address)
}

func nodePods6(number int) netip.Prefix {
	address := podNetwork6().Addr().As16()
	address[7] = byte(number)
	return netip.PrefixFrom(netip.AddrFrom16(address), 64)
}

// route makes a host route a prefix by way of a gateway to which it has a route.
func route(host *topology.Host, to netip.Prefix, gateway netip.Addr) error {
	routes, err := host.Netlink.RouteGet(gateway.AsSlice())
	if err != nil || len(routes) == 0 {
		return fmt.Errorf("look up route to %s: %d found: %w", gateway, len(routes), err)
	}
	err = host.Netlink.RouteReplace(&netlink.Route{
		LinkIndex: routes[0].LinkIndex,
		Dst:       &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())},
		Gw:        gateway.AsSlice(),
		Flags:     int(netlink.FLAG_ONLINK),
	})
	if err != nil {
		return fmt.Errorf("route %s to %s: %w", to, gateway, err)
	}
	return nil
}
