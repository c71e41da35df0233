// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func masqueradeSources(e *examination, f *Finding) {
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	e.noteAs("list the routes", err)
	addresses, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	e.noteAs("list the addresses", err)
	for _, r := range routes {
		isDefault := r.Dst == nil || r.Dst.String() == "0.0.0.0/0"
		if !isDefault || r.Src == nil || r.Type != unix.RTN_UNICAST {
			continue
		}
		hops := r.MultiPath
		if len(hops) == 0 {
			hops = []*netlink.NexthopInfo{{LinkIndex: r.LinkIndex, Gw: r.Gw}}
		}
		for _, hop := range hops {
			link, err := net.InterfaceByIndex(hop.LinkIndex)
			chosen := masqueradeSource(addresses, hop.LinkIndex, hop.Gw)
			if err != nil || !e.masqueradesOut(link.Name) || chosen == nil || chosen.Equal(r.Src) {
				continue
			}
			via := ""
			if hop.Gw != nil {
				via = " via " + hop.Gw.String()
			}
			f.add("%s: MASQUERADE takes %s, and the default route%s has src %s", link.Name, chosen, via, r.Src)
		}
	}
	slices.Sort(f.Details)
	f.Details = slices.Compact(f.Details)
}

func connectedOutputs(e *examination, f *Finding) {
	addresses, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	e.noteAs("list the addresses", err)
	for _, p := range e.Rules.Policies() {
		for _, o := range p.Outputs {
			for _, a := range addresses {
				ip := net.IP(o.Address.AsSlice())
				if o.Interface != "" || a.IP.Equal(ip) || !a.Contains(ip) {
					continue
				}
				if link, err := net.InterfaceByIndex(a.LinkIndex); err == nil {
					f.add("%s is in %s, the subnet of %s", o.Address, a.IPNet, link.Name)
				}
			}
		}
	}
}

// masqueradesOut reports whether pods leave through the interface with the address that the kernel chooses.
func (e *examination) masqueradesOut(name string) bool {
	return slices.ContainsFunc(e.Rules.Policies(), func(p policy.Policy) bool {
		return p.OutputAddressFor(policy.IPv4, name) == nil &&
			(len(p.Interfaces.Value) == 0 || slices.ContainsFunc(p.Interfaces.Value, thirdparty.Packets{Out: name}.Leaves))
	})
}

// masqueradeSource returns the address that the kernel's masquerading takes for packets that leave through
// an interface to a next hop: inet_select_addr with scope global. The addresses are in the kernel's order.
func masqueradeSource(addresses []netlink.Addr, link int, nextHop net.IP) net.IP {
	var first, elsewhere net.IP
	for _, a := range addresses {
		subnet := cmp.Or(a.Peer, a.IPNet)
		switch {
		case a.Flags&unix.IFA_F_SECONDARY != 0 || a.Scope != unix.RT_SCOPE_UNIVERSE:
		case a.LinkIndex != link && elsewhere == nil:
			elsewhere = a.IP
		case a.LinkIndex != link:
		case nextHop != nil && subnet.Contains(nextHop):
			return a.IP
		case first == nil:
			first = a.IP
		}
	}
	if first == nil {
		return elsewhere
	}
	return first
}

func nodePortOverlap(e *examination, f *Finding) {
	nodePorts, err := thirdparty.NodePorts(e.ctx)
	e.noteAs("read the rules of kube-proxy", err)
	for _, p := range e.Rules.Policies() {
		ports := p.ToPorts.Value
		if len(ports) == 0 && p.RandomFully.Value {
			ports = policy.Ports{{First: 1024, Last: 65535}} // of connections from unprivileged ports
		}
		var taken []string
		for _, port := range nodePorts {
			if slices.ContainsFunc(ports, func(r policy.PortRange) bool { return r.First <= port && port <= r.Last }) {
				taken = append(taken, fmt.Sprint(port))
			}
		}
		if len(taken) > 0 {
			f.add("%s: source ports %s include node port %s", p.Chain, ports, strings.Join(policy.First(4, taken), ", "))
		}
	}
}

// caught adds the rules to a finding that apply to packets which a guard catches. It reads them for each guard.
func (e *examination) caught(f *Finding, what string, read func(policy.Guard) ([]thirdparty.Rule, error)) {
	for _, g := range e.Rules.Guard.Desired {
		if g.Mode == policy.GuardOff {
			continue
		}
		rules, err := read(g)
		e.noteAs("read the rules before "+what, err)
		multicast := map[policy.Family]string{policy.IPv4: "224.0.0.0/4", policy.IPv6: "ff00::/8"}[g.Family] // which no guard catches
		masqueraded := policy.RangesOf(g.Family.All()).Without(g.Exempt).Without(policy.RangesOf(netip.MustParsePrefix(multicast)))
		for _, r := range rules {
			outOfScope := len(g.Scope.Interfaces) > 0 && !slices.ContainsFunc(g.Scope.Interfaces, r.Match.Leaves) || r.Match.Out == "lo"
			if r.Family == g.Family && !outOfScope && r.Destinations(g.Scope.Sources).Overlaps(masqueraded) {
				f.add("%s: the guard of %s %ss these packets", r.Text, g.Chain, g.Mode)
			}
		}
	}
}

func untrackedPods(e *examination, f *Finding) {
	e.caught(f, "connection tracking", func(policy.Guard) ([]thirdparty.Rule, error) { return thirdparty.Untracked(e.ctx) })
}

func acceptedPods(e *examination, f *Finding) {
	e.caught(f, "the jump", func(g policy.Guard) ([]thirdparty.Rule, error) {
		return thirdparty.Accepted(e.ctx, func(at thirdparty.Place) bool {
			name, _ := masqChainOf(at)
			return name == g.Chain && at.Backend == policy.IPTables && e.hasChoice(at.Backend, at.Variant)
		})
	})
}
