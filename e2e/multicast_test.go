// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestMulticast checks the source of multicast and broadcast between two pods of a bridge whose packets pass the hooks
// of IP (br_netfilter). A network's chain exempts them without a key. A chain of the agent files alone masquerades them,
// as the agents do.
func TestMulticast(t *testing.T) {
	const groups, broadcast = "239.1.1.1 ff05::1:3", "255.255.255.255"
	for _, c := range []struct {
		name                string
		keys                object
		agentFiles          bool
		exempt, masqueraded string
	}{
		{name: "without a key", keys: object{"enableIPv6": true}, exempt: groups + " " + broadcast},
		{name: "nothing else exempt", exempt: groups + " " + broadcast,
			keys: object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{}, "masqLinkLocal": true, "masqLinkLocalIPv6": true}},
		{name: "a wider prefix masqueraded", exempt: groups + " " + broadcast,
			keys: object{"enableIPv6": true, "masqueradeCIDRs": []string{"224.0.0.0/3", "fe00::/7"}}},
		{name: "these prefixes masqueraded", exempt: broadcast, masqueraded: groups,
			keys: object{"enableIPv6": true, "masqueradeCIDRs": []string{"224.0.0.0/4", "ff00::/8"}}},
		{name: "one group masqueraded", exempt: "239.1.1.2 ff05::1:3", masqueraded: "239.1.1.1",
			keys: object{"enableIPv6": true, "masqueradeCIDRs": []string{"239.1.1.1/32"}}},
		{name: "enforced, beside a guard", exempt: groups + " " + broadcast,
			keys: object{"enableIPv6": true, "enforceExempt": true, "guard": "drop"}},
		{name: "agent files alone", agentFiles: true, masqueraded: groups},
	} {
		t.Run(c.name, func(t *testing.T) {
			onEveryBackend(t, func(t *testing.T, n *node) {
				must(t, n.Node.Sysctl("net/bridge/bridge-nf-call-iptables", "1"))
				must(t, n.Node.Sysctl("net/bridge/bridge-nf-call-ip6tables", "1"))
				if c.agentFiles {
					n.write(t, "podnet", n.bridge("podnet"))
					n.agentFile(t, "ip-masq-agent", "enableIPv6: true\nbackend: "+n.backend.setting+"\n")
					n.reconcileOnce(t)
				} else {
					n.conflist(t, "podnet", c.keys)
				}
				from, to := n.pod(t, "podnet"), n.pod(t, "podnet")
				for _, group := range addressList(c.exempt) {
					own := netip.AddrPortFrom(from.addr(group), n.nextPort())
					if seen := n.sendToGroup(t, from, to, own, group); seen != own {
						t.Errorf("%s: came from %s, was sent from %s", group, seen, own)
					}
				}
				for _, group := range addressList(c.masqueraded) {
					own := netip.AddrPortFrom(from.addr(group), n.nextPort())
					if seen := n.sendToGroup(t, from, to, own, group); seen.Addr() == own.Addr() {
						t.Errorf("%s: came from the pod's own address %s", group, seen)
					}
				}
				if t.Failed() {
					t.Log(n.rules(t))
				}
			})
		})
	}
}

// sendToGroup sends packets from an address of one pod until another pod, a member of the group, has received one. It
// returns the source that the member sees.
func (n *node) sendToGroup(t *testing.T, from, to *pod, own netip.AddrPort, group netip.Addr) (seen netip.AddrPort) {
	t.Helper()
	const port, within = 5007, 5 * time.Second
	var member, sender *net.UDPConn
	must(t, to.Do(func() (err error) {
		member, err = joinGroup(netip.AddrPortFrom(group, port))
		return err
	}))
	defer func() { must(t, member.Close()) }()
	must(t, from.Do(func() (err error) {
		sender, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(own))
		return err
	}))
	defer func() { must(t, sender.Close()) }()
	if group.Is6() {
		group = group.WithZone("eth0")
	}
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	for ctx.Err() == nil {
		must(t, from.Do(func() error {
			_, err := sender.WriteToUDPAddrPort([]byte("to all"), netip.AddrPortFrom(group, port))
			return err
		}))
		must(t, member.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
		_, source, err := member.ReadFromUDPAddrPort(make([]byte, 100))
		if err == nil {
			return netip.AddrPortFrom(source.Addr().Unmap().WithZone(""), source.Port())
		}
	}
	t.Fatalf("no packet to %s arrived in %s", group, within)
	return seen
}

// joinGroup listens at a group, or at the broadcast address.
func joinGroup(at netip.AddrPort) (*net.UDPConn, error) {
	if !at.Addr().IsMulticast() {
		return net.ListenUDP("udp4", &net.UDPAddr{Port: int(at.Port())})
	}
	device, err := net.InterfaceByName("eth0")
	if err != nil {
		return nil, err
	}
	return net.ListenMulticastUDP("udp", device, net.UDPAddrFromAddrPort(at))
}

func addressList(text string) (all []netip.Addr) {
	for _, word := range strings.Fields(text) {
		all = append(all, netip.MustParseAddr(word))
	}
	return all
}
