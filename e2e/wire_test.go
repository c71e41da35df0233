// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Additional addresses of the node: VIPs, as load balancers and keepalived add them.
var (
	vip4 = netip.MustParseAddr("192.0.2.77")
	vip6 = netip.MustParseAddr("2001:db8:77::77")
)

// Addresses of a host whose traffic passes the node and that is not a pod.
var (
	transit4 = netip.MustParseAddr("172.20.0.5")
	transit6 = netip.MustParseAddr("fd00:77::5")
)

// senders are the hosts that send in a test: the pod, the node from its VIP, and a host in transit.
type senders map[string]sender

type sender struct {
	host  *topology.Host
	addrs []netip.Addr
}

func newSenders(t *testing.T, n *node, p *pod) senders {
	t.Helper()
	addAddress(t, n.Node, "lo", vip4)
	addAddress(t, n.Node, "lo", vip6)
	transit := topology.Must(n.AddPod("transit", transit4, transit6))(t)
	return senders{
		"pod":     {p.Host, p.addrs},
		"vip":     {n.Node, []netip.Addr{vip4, vip6}},
		"transit": {transit, transit.Addrs},
	}
}

func addAddress(t *testing.T, h *topology.Host, device string, a netip.Addr) {
	t.Helper()
	link := topology.Must(h.Netlink.LinkByName(device))(t)
	address := topology.Must(netlink.ParseAddr(netip.PrefixFrom(a, a.BitLen()).String()))(t)
	if a.Is6() {
		address.Flags = unix.IFA_F_NODAD
	}
	must(t, h.Netlink.AddrAdd(link, address))
}

// nextPort returns a new port, so that each probe is a new connection.
func (n *node) nextPort() uint16 {
	const first = 20000
	n.ports++
	return first + n.ports
}

// transports returns the functions that send a probe.
func transports() map[string]func(*topology.Host, netip.AddrPort, ...topology.Option) (topology.Seen, error) {
	return map[string]func(*topology.Host, netip.AddrPort, ...topology.Option) (topology.Seen, error){
		"udp": (*topology.Host).SendUDP, "tcp": (*topology.Host).SendTCP,
	}
}

// verdicts sends from each sender to each destination (separated by spaces) and compares the source
// seen by the receiver: the sender's address and port if exempt, the node's address on the
// interface to the receiver if masqueraded.
func (s senders) verdicts(t *testing.T, n *node, masqueraded bool, flows map[string]string) {
	t.Helper()
	for who, destinations := range flows {
		from, known := s[who]
		if !known {
			t.Fatalf("no sender %s", who)
		}
		for _, text := range strings.Fields(destinations) {
			to := netip.AddrPortFrom(netip.MustParseAddr(text), topology.EchoPort)
			own := from.addr(to.Addr())
			for transport, send := range transports() {
				sent := netip.AddrPortFrom(own, n.nextPort())
				seen, err := send(from.host, to, topology.FromAddr(sent.Addr()), topology.FromPort(sent.Port()))
				if err != nil {
					t.Errorf("%s %s to %s: %v", transport, who, text, err)
					continue
				}
				node := n.NodeAddr(n.remoteHost(seen.By), to.Addr())
				switch {
				case !masqueraded && seen.Source != sent:
					t.Errorf("%s %s to %s: came from %s, want %s", transport, who, text, seen.Source, sent)
				case masqueraded && seen.Source.Addr() != node:
					t.Errorf("%s %s to %s: came from %s, want the node's %s", transport, who, text, seen.Source, node)
				}
			}
		}
	}
}

func (s sender) addr(like netip.Addr) netip.Addr {
	for _, a := range s.addrs {
		if a.Is4() == like.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// remoteHost returns the remote host with the name.
func (n *node) remoteHost(name string) *topology.Host {
	if name == n.LAN.Name {
		return n.LAN
	}
	return n.Outside
}
