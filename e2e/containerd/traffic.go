// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Destination is a destination of pods, and whether the policy masquerades it.
type Destination struct {
	To          string
	Masqueraded bool
}

// Destinations returns destinations in a topology for the default prefixes with fd00::/8.
func Destinations() []Destination {
	return []Destination{
		{"203.0.113.11:7", true}, {"198.51.100.7:7", true}, {"[2001:db8:113::11]:7", true},
		{"192.168.50.11:7", false}, {"10.200.0.1:7", false}, {"[fd00:50::11]:7", false},
	}
}

// Source returns the source address that the receiver must see of a packet from a pod with these addresses.
func (d Destination) Source(w *topology.Topology, addrs []netip.Addr) netip.Addr {
	to := netip.MustParseAddrPort(d.To).Addr()
	if d.Masqueraded {
		return w.NodeAddr(w.Outside, to)
	}
	i := slices.IndexFunc(addrs, func(a netip.Addr) bool { return a.Is4() == to.Is4() })
	if i < 0 {
		return netip.Addr{}
	}
	return addrs[i]
}

// FirstPackets runs a container that sends one packet to each of the destinations as soon as it starts, and
// compares the source addresses that the receivers see with the policy.
func (p *Pod) FirstPackets(ctx context.Context, w *topology.Topology, to []Destination) error {
	args := []string{"first"}
	for _, d := range to {
		args = append(args, "udp:"+d.To)
	}
	c, err := p.Run(ctx, "first", PodImage, args...)
	if err != nil {
		return err
	}
	lines, err := c.Await(ctx, len(to))
	if err != nil {
		return err
	}
	var errs []error
	for i, d := range to {
		fields := strings.Fields(lines[i]) // flow, receiver, source
		source, err := netip.ParseAddrPort(fields[len(fields)-1])
		if want := d.Source(w, p.Addrs); err != nil || source.Addr() != want {
			errs = append(errs, fmt.Errorf("first packet: %s, want %s", strings.TrimSpace(lines[i]), want))
		}
	}
	return errors.Join(errs...)
}
