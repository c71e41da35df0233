// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// prefixes returns the keys of the entry that match containerd.Destinations.
func prefixes() object {
	return object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fd00::/8"}}
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
	for _, d := range containerd.Destinations() {
		for protocol, send := range map[string]func(netip.AddrPort, ...topology.Option) (topology.Seen, error){"udp": h.SendUDP, "tcp": h.SendTCP} {
			seen, err := send(netip.MustParseAddrPort(d.To))
			if err != nil {
				t.Errorf("%s to %s: %v", protocol, d.To, err)
				continue
			}
			if want := d.Source(n.Topology, addrs); seen.Source.Addr() != want {
				t.Errorf("%s to %s: %s saw %s, want %s", protocol, d.To, seen.By, seen.Source, want)
			}
		}
	}
}
