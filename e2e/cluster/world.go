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

// routePods makes the router route a node's pods to the node.
func routePods(router *topology.Host, node netip.Addr, pods netip.Prefix) error {
	routes, err := router.Netlink.RouteGet(node.AsSlice())
	if err != nil || len(routes) == 0 {
		return fmt.Errorf("look up route to %s: %d found: %w", node, len(routes), err)
	}
	err = router.Netlink.RouteReplace(&netlink.Route{
		LinkIndex: routes[0].LinkIndex,
		Dst:       &net.IPNet{IP: pods.Addr().AsSlice(), Mask: net.CIDRMask(pods.Bits(), 32)},
		Gw:        node.AsSlice(),
		Flags:     int(netlink.FLAG_ONLINK),
	})
	if err != nil {
		return fmt.Errorf("route pods %s to %s: %w", pods, node, err)
	}
	return nil
}
