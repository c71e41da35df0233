// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// destination is a destination of pods and its verdict.
type destination struct {
	to     string
	remote func(*node) *topology.Host
	// masqueraded: the receiver sees the node's address, else the pod's.
	masqueraded bool
}

func lan(n *node) *topology.Host     { return n.LAN }
func outside(n *node) *topology.Host { return n.Outside }

// destinations returns the destinations for the default prefixes with fd00::/8.
func destinations() []destination {
	return []destination{
		{"203.0.113.11:7", outside, true},
		{"198.51.100.7:7", outside, true},
		{"192.168.50.11:7", lan, false},
		{"10.200.0.1:7", lan, false},
		{"[2001:db8:113::11]:7", outside, true},
		{"[fd00:50::11]:7", lan, false},
	}
}

// prefixes returns the keys of the entry that match destinations.
func prefixes() object {
	return object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fd00::/8"}}
}

// want returns the source address that the receiver must see for a pod with these addresses.
func (d destination) want(n *node, addrs []netip.Addr) netip.Addr {
	to := netip.MustParseAddrPort(d.to).Addr()
	if d.masqueraded {
		return n.NodeAddr(d.remote(n), to)
	}
	for _, a := range addrs {
		if a.Is4() == to.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// adopt makes a host of a pod's network namespace.
func (n *node) adopt(t *testing.T, netns string) *topology.Host {
	t.Helper()
	n.adopted++
	h := topology.Must(n.Adopt(fmt.Sprint("adopted", n.adopted), netns))(t)
	t.Cleanup(func() { must(t, h.Close()) })
	return h
}

// verdicts sends from a pod to all destinations with UDP and TCP and compares the seen source
// addresses with the policy.
func (n *node) verdicts(t *testing.T, h *topology.Host, addrs []netip.Addr) {
	t.Helper()
	for _, d := range destinations() {
		for protocol, send := range map[string]func(netip.AddrPort, ...topology.Option) (topology.Seen, error){"udp": h.SendUDP, "tcp": h.SendTCP} {
			seen, err := send(netip.MustParseAddrPort(d.to))
			if err != nil {
				t.Errorf("%s to %s: %v", protocol, d.to, err)
				continue
			}
			if want := d.want(n, addrs); seen.Source.Addr() != want || seen.By != d.remote(n).Name {
				t.Errorf("%s to %s: %s saw %s, want %s", protocol, d.to, seen.By, seen.Source, want)
			}
		}
	}
}
