// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// guardedNode is a node with two pods on a bridge whose packets pass the hooks of IP (br_netfilter),
// a host in transit, and a VXLAN to the LAN host. Its policy exempts private destinations or
// nothing.
type guardedNode struct {
	*node
	keys    object
	exempts bool
	a, b    *pod
	transit *topology.Host
}

// policies are the policies of guarded nodes.
func guardedPolicies() map[string]object {
	return map[string]object{
		"private destinations exempt": {"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"}},
		"nothing exempt":              {"nonMasqueradeCIDRs": []string{}, "masqLinkLocal": true, "masqLinkLocalIPv6": true},
	}
}

func newGuardedNode(t *testing.T, f backend, policy, keys object) *guardedNode {
	t.Helper()
	g := &guardedNode{node: newNode(t, f), keys: object{"enableIPv6": true, "randomFully": false, "guard": "drop"}}
	for _, part := range []object{policy, keys} {
		for k, v := range part {
			g.keys[k] = v
		}
	}
	g.exempts = len(policy["nonMasqueradeCIDRs"].([]string)) > 0
	must(t, g.Node.Sysctl("net/bridge/bridge-nf-call-iptables", "1"))
	must(t, g.Node.Sysctl("net/bridge/bridge-nf-call-ip6tables", "1"))
	g.network(t, "podnet")
	g.a, g.b = g.pod(t, "podnet"), g.pod(t, "podnet")
	g.transit = g.AddPod(t, "transit", transit4, transit6)
	for _, end := range []struct {
		host          *topology.Host
		device        string
		local, remote string
		addrs         []string
	}{
		{g.Node, "lan", "192.168.50.10", "192.168.50.11", []string{"10.200.0.1/30", "fd00:200::1/126"}},
		{g.LAN, "eth0", "192.168.50.11", "192.168.50.10", []string{"10.200.0.2/30", "fd00:200::2/126"}},
	} {
		g.on(t, end.host, "ip", "link", "add", "vxlan0", "type", "vxlan", "id", "1", "dev", end.device, "local", end.local, "remote", end.remote, "dstport", "8472")
		for _, a := range end.addrs {
			g.on(t, end.host, "ip", "addr", "add", a, "dev", "vxlan0", "nodad")
		}
		g.on(t, end.host, "ip", "link", "set", "vxlan0", "up")
	}
	return g
}

// network writes a conflist whose pods can reach themselves through the bridge, with more plugins
// behind the entry.
func (g *guardedNode) network(t *testing.T, name string, more ...map[string]any) {
	t.Helper()
	bridge := g.bridge(name)
	bridge["hairpinMode"] = true
	g.write(t, name, append([]map[string]any{bridge, g.entry(g.keys)}, more...)...)
}

// on runs a program on a host.
func (n *node) on(t *testing.T, h *topology.Host, name string, args ...string) {
	t.Helper()
	if stdout, stderr, code := run(t, h.Command(n.timeout(t), name, args...)); code != 0 {
		t.Fatalf("%s %v on %s: exit code %d\n%s%s", name, args, h.Name, code, stdout, stderr)
	}
}

// probeFlow is a UDP and a TCP flow that must be answered.
type probeFlow struct {
	name string
	from *topology.Host
	addr netip.Addr // source; by default the kernel's choice
	to   netip.AddrPort
	by   *topology.Host
	seen netip.Addr // source address that the receiver sees
}

// at returns the address of the family with the EchoPort.
func (g *guardedNode) at(ipv4, ipv6 string, like netip.Addr) netip.AddrPort {
	if like.Is4() {
		return echoAt(ipv4)
	}
	return echoAt(ipv6)
}

func echoAt(a string) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(a), topology.EchoPort)
}

// gateway returns the node's address on a bridge.
func gateway(network int, like netip.Addr) netip.Addr {
	if like.Is4() {
		return netip.AddrFrom4([4]byte{10, byte(network), 0, 1})
	}
	return netip.MustParseAddr(fmt.Sprintf("fd00:%d::1", network))
}

// unlessMasqueraded returns the sender's own address if the policy exempts private destinations.
func (g *guardedNode) unlessMasqueraded(own, node netip.Addr) netip.Addr {
	if g.exempts {
		return own
	}
	return node
}

// plainFlows returns flows of one family that involve no Service.
func (g *guardedNode) plainFlows(f netip.Addr) []probeFlow {
	a, b := g.a.addr(f), g.b.addr(f)
	lan, outside := g.NodeAddr(g.LAN, f), g.NodeAddr(g.Outside, f)
	transit := sender{addrs: g.transit.Addrs}.addr(f)
	world, private, tunnel := g.at("1.2.3.4", "2001:db8:5::4", f), g.at("10.9.9.9", "fd00:9::9", f), g.at("10.200.0.2", "fd00:200::2", f)
	at := func(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, topology.EchoPort) }
	return []probeFlow{
		{"pod to the world", g.a.Host, a, world, g.Outside, outside},
		{"pod to a private destination", g.a.Host, a, private, g.LAN, g.unlessMasqueraded(a, lan)},
		{"pod to the node", g.a.Host, a, at(lan), g.Node, a},
		{"pod to its gateway", g.a.Host, a, at(gateway(1, f)), g.Node, a},
		{"pod to another pod over the bridge", g.a.Host, a, at(b), g.b.Host, g.unlessMasqueraded(a, gateway(1, f))},
		{"pod into the VXLAN", g.a.Host, a, tunnel, g.LAN, g.unlessMasqueraded(a, g.at("10.200.0.1", "fd00:200::1", f).Addr())},
		{"world to the pod", g.Outside, netip.Addr{}, at(a), g.a.Host, g.unlessMasqueraded(outside.Next(), gateway(1, f))},
		{"LAN to the pod", g.LAN, netip.Addr{}, at(a), g.a.Host, g.unlessMasqueraded(lan.Next(), gateway(1, f))},
		{"transit to the world", g.transit, transit, world, g.Outside, outside},
		{"transit to a private destination", g.transit, transit, private, g.LAN, g.unlessMasqueraded(transit, lan)},
		{"node to the world", g.Node, netip.Addr{}, world, g.Outside, outside},
		{"node to a private destination", g.Node, netip.Addr{}, private, g.LAN, lan},
		{"node to the world from the bridge's address", g.Node, gateway(1, f), world, g.Outside, outside},
		{"node to the pod", g.Node, netip.Addr{}, at(a), g.a.Host, gateway(1, f)},
		{"node into the VXLAN", g.Node, netip.Addr{}, tunnel, g.LAN, g.at("10.200.0.1", "fd00:200::1", f).Addr()},
	}
}

// services returns the Services of serviceFlows for one family.
func (g *guardedNode) services(f netip.Addr) []kubeService {
	pod := netip.AddrPortFrom(g.a.addr(f), topology.EchoPort)
	private, world := g.at("10.9.9.9", "fd00:9::9", f), g.at("1.2.3.4", "2001:db8:5::4", f)
	cluster := g.at("10.96.0.1", "fd00:96::1", f).Addr()
	return []kubeService{
		{addr: cluster, port: 80, endpoint: pod},
		{addr: cluster, port: 81, endpoint: private},
		{addr: cluster, port: 82, endpoint: world},
		{port: 30001, endpoint: pod, marked: true},
		{port: 30002, endpoint: pod},
		{port: 30003, endpoint: private, marked: true},
	}
}

// serviceFlows returns flows to Services of one family.
func (g *guardedNode) serviceFlows(f netip.Addr) []probeFlow {
	a, b := g.a.addr(f), g.b.addr(f)
	lan, outside := g.NodeAddr(g.LAN, f), g.NodeAddr(g.Outside, f)
	cluster := g.at("10.96.0.1", "fd00:96::1", f).Addr()
	at := netip.AddrPortFrom
	return []probeFlow{
		{"hairpin", g.a.Host, a, at(cluster, 80), g.a.Host, gateway(1, f)},
		{"another pod to the Service", g.b.Host, b, at(cluster, 80), g.a.Host, g.unlessMasqueraded(b, gateway(1, f))},
		{"node to the Service", g.Node, netip.Addr{}, at(cluster, 80), g.a.Host, netip.Addr{}},
		{"pod to a Service with a private endpoint", g.a.Host, a, at(cluster, 81), g.LAN, g.unlessMasqueraded(a, lan)},
		{"pod to a Service with an endpoint in the world", g.a.Host, a, at(cluster, 82), g.Outside, outside},
		{"NodePort, Cluster", g.Outside, netip.Addr{}, at(outside, 30001), g.a.Host, gateway(1, f)},
		{"NodePort, Local", g.Outside, netip.Addr{}, at(outside, 30002), g.a.Host, g.unlessMasqueraded(outside.Next(), gateway(1, f))},
		{"NodePort, Cluster, with a private endpoint", g.Outside, netip.Addr{}, at(outside, 30003), g.LAN, lan},
		{"hairpin through a NodePort", g.a.Host, a, at(lan, 30001), g.a.Host, gateway(1, f)},
		{"pod to a NodePort, Cluster", g.b.Host, b, at(lan, 30001), g.a.Host, gateway(1, f)},
	}
}

// portmapFlows returns flows of one family to a host port of a pod of the second network.
func (g *guardedNode) portmapFlows(f netip.Addr, mapped *pod) []probeFlow {
	a, m := g.a.addr(f), mapped.addr(f)
	lan, outside := g.NodeAddr(g.LAN, f), g.NodeAddr(g.Outside, f)
	at := netip.AddrPortFrom
	return []probeFlow{
		{"world to the host port", g.Outside, netip.Addr{}, at(outside, hostPort), mapped.Host, g.unlessMasqueraded(outside.Next(), gateway(2, f))},
		{"hairpin through the host port", mapped.Host, m, at(lan, hostPort), mapped.Host, gateway(2, f)},
		{"another pod to the host port", g.a.Host, a, at(lan, hostPort), mapped.Host, g.unlessMasqueraded(a, gateway(2, f))},
		{"pod to the world", mapped.Host, m, g.at("1.2.3.4", "2001:db8:5::4", f), g.Outside, outside},
	}
}

const hostPort = 8080

// mappedPod makes a pod of a second network with a host port.
func (g *guardedNode) mappedPod(t *testing.T, backend string) *pod {
	t.Helper()
	before := g.cni.Env
	defer func() { g.cni.Env = before }()
	g.cni.Env = []string{"PATH=" + g.path + ":" + os.Getenv("PATH"), fmt.Sprintf(
		`CAP_ARGS={"portMappings": [{"hostPort": %d, "containerPort": %d, "protocol": "udp"}, {"hostPort": %[1]d, "containerPort": %d, "protocol": "tcp"}]}`,
		hostPort, topology.EchoPort, topology.EchoPort)}
	g.network(t, "mapped", map[string]any{"type": "portmap", "capabilities": object{"portMappings": true}, "backend": backend})
	return g.pod(t, "mapped")
}

// wantFlows sends each flow this many times by UDP, and a fifth as often by TCP.
func (g *guardedNode) wantFlows(t *testing.T, times int, flows []probeFlow) {
	t.Helper()
	for _, f := range flows {
		if t.Failed() {
			return
		}
		for transport, send := range transports() {
			var wrong []string
			attempts := times
			if transport == "tcp" {
				attempts = (times + 4) / 5 // a flow costs five times as much
			}
			for range attempts {
				options := []topology.Option{topology.FromPort(g.nextPort())}
				if f.addr.IsValid() {
					options = append(options, topology.FromAddr(f.addr))
				}
				seen, err := send(f.from, f.to, options...)
				if err != nil || !seen.Answered || seen.By != f.by.Name || f.seen.IsValid() && seen.Source.Addr() != f.seen {
					wrong = append(wrong, fmt.Sprintf("%+v %v", seen, err))
				}
				if err != nil || !seen.Answered {
					break // it took the whole limit
				}
			}
			if len(wrong) > 0 {
				t.Errorf("%s, %s to %s: %d of %d flows are wrong, for example %s; want %s at %s", f.name, transport, f.to, len(wrong), attempts, wrong[0], f.seen, f.by.Name)
			}
		}
	}
}

// TestGuardHarmless sends flows and packets outside of flows that are right although their source
// is in a pod range or NAT skips them. With guard drop all arrive, and no guard counts a packet.
func TestGuardHarmless(t *testing.T) {
	for _, f := range backends() {
		for name, policy := range guardedPolicies() {
			t.Run(f.name+", "+name, func(t *testing.T) {
				t.Parallel()
				checkHarmless(t, f, policy, nil)
			})
		}
	}
}

// checkHarmless checks every kind of traffic that a guarded node must not disturb.
func checkHarmless(t *testing.T, f backend, policy, keys object) {
	t.Helper()
	t.Run("plain", func(t *testing.T) {
		g := newGuardedNode(t, f, policy, keys)
		for _, like := range masqueradedDestinations {
			g.wantFlows(t, packetsPerKind, g.plainFlows(like))
		}
		g.discoverNeighbours(t)
		g.sendLooseKinds(t)
		g.wantNoneGuarded(t)
	})
	modes := []string{"iptables", "nftables"}
	switch {
	case f.variant == "legacy":
		modes = nil // the guard is the same
	case len(policy["nonMasqueradeCIDRs"].([]string)) == 0:
		modes = modes[1:]
	}
	for _, mode := range modes {
		t.Run("kube-proxy, mode "+mode, func(t *testing.T) {
			g := newGuardedNode(t, f, policy, keys)
			for _, like := range masqueradedDestinations {
				g.kubeProxy(t, mode, g.services(like))
				g.wantFlows(t, packetsPerKind, g.serviceFlows(like))
			}
			g.wantNoneGuarded(t)
		})
		t.Run("portmap, backend "+mode, func(t *testing.T) {
			g := newGuardedNode(t, f, policy, keys)
			mapped := g.mappedPod(t, mode)
			for _, like := range masqueradedDestinations {
				g.wantFlows(t, packetsPerKind, g.portmapFlows(like, mapped))
			}
			g.wantNoneGuarded(t)
		})
	}
}

func (g *guardedNode) wantNoneGuarded(t *testing.T) {
	t.Helper()
	wantSame(t, "packets that the guard dropped", g.guardPackets(t), 0)
}

// discoverNeighbours lets both pods forget each other's link-layer address before each flow. The
// bridge passes the packets of neighbour discovery to the hooks of IPv6; conntrack does not track
// them.
func (g *guardedNode) discoverNeighbours(t *testing.T) {
	t.Helper()
	b := netip.AddrPortFrom(g.b.addr(netip.IPv6Unspecified()), topology.EchoPort)
	for i := 0; i < packetsPerKind && !t.Failed(); i++ {
		for _, p := range []*pod{g.a, g.b} {
			neighbours := assert.Must(p.Netlink.NeighList(0, unix.AF_INET6))(t)
			for i := range neighbours {
				if neighbours[i].State != netlink.NUD_NOARP {
					must(t, p.Netlink.NeighDel(&neighbours[i]))
				}
			}
		}
		g.wantFlows(t, 1, []probeFlow{{"pod to a new neighbour", g.a.Host, g.a.addr(b.Addr()), b, g.b.Host, g.unlessMasqueraded(g.a.addr(b.Addr()), gateway(1, b.Addr()))}})
	}
}

// looseKind is a kind of packets that NAT skips. With before, a datagram that the pod sends and one
// that it receives arrive first.
type looseKind struct {
	name   string
	from   *topology.Host
	addr   netip.Addr
	packet func(from, to netip.AddrPort) []byte
	before func(from, to netip.AddrPort) (sent, received []byte)
	to     netip.Addr
	seen   netip.Addr
}

func (g *guardedNode) looseKinds(family int) []looseKind {
	world, private := silentDestinations[family], silentExemptDestinations[family]
	a, node, bridge := g.a.addr(world), g.NodeAddr(g.Outside, world), gateway(1, world)
	transit := sender{addrs: g.transit.Addrs}.addr(world)
	late := tcp(fin|ack, 0, 0)
	reply := func(pod, to netip.AddrPort) (_, _ []byte) {
		return udpDatagram(pod, to), udpDatagram(to, netip.AddrPortFrom(node, pod.Port()))
	}
	kinds := []looseKind{
		{name: "late FIN of transit", from: g.transit, addr: transit, packet: late, to: world, seen: transit},
		{name: "late FIN of the node", from: g.Node, addr: node, packet: late, to: world, seen: node},
		{name: "late FIN of the node from the bridge's address", from: g.Node, addr: bridge, packet: late, to: world, seen: bridge},
		{name: "ICMP error for a reply", from: g.a.Host, addr: a, packet: portUnreachable, before: reply, to: world, seen: node},
	}
	if !g.exempts {
		return kinds
	}
	direct := func(pod, to netip.AddrPort) (_, _ []byte) { return nil, udpDatagram(to, pod) }
	return append(kinds,
		looseKind{name: "ICMP error for a datagram from the world", from: g.a.Host, addr: a, packet: portUnreachable, before: direct, to: world, seen: a},
		looseKind{name: "late FIN to a private destination", from: g.a.Host, addr: a, packet: late, to: private, seen: a},
		looseKind{name: "SYN with ACK to a private destination", from: g.a.Host, addr: a, packet: tcp(syn|ack, 0, 0), to: private, seen: a})
}

// sendLooseKinds sends packets of each kind to an address of its own.
func (g *guardedNode) sendLooseKinds(t *testing.T) {
	t.Helper()
	outside, lan, inside := g.countPackets(t, g.Outside), g.countPackets(t, g.LAN), g.countPackets(t, g.a.Host)
	var sent, received [][]byte
	packets, want := map[*topology.Host][][]byte{}, map[packetCounters]map[[2]netip.Addr]int{outside: {}, lan: {}}
	names := map[[2]netip.Addr]string{}
	for family := range families() {
		for i, k := range g.looseKinds(family) {
			at, to := outside, nth(k.to, i+1)
			if k.to == silentExemptDestinations[family] {
				at = lan
			}
			want[at][[2]netip.Addr{k.seen, to}] = packetsPerKind
			names[[2]netip.Addr{k.seen, to}] = k.name
			for range packetsPerKind {
				g.ports++
				from, to := netip.AddrPortFrom(k.addr, 30000+g.ports), netip.AddrPortFrom(to, 999)
				if k.before != nil {
					request, reply := k.before(from, to)
					received = append(received, reply)
					if request != nil {
						sent = append(sent, request)
					}
				}
				packets[k.from] = append(packets[k.from], k.packet(from, to))
			}
		}
	}
	outside.exchange(t, g.a.Host, sent)
	inside.exchange(t, g.Outside, received)
	outside.reset(t)
	for host, all := range packets {
		inject(t, host, all...)
	}
	for at, counts := range want {
		g.await(t, "packets at "+at.host.Name, func() bool { return at.total(t) >= len(counts)*packetsPerKind })
		got := at.received(t)
		for flow, count := range counts {
			if got[flow] != count {
				t.Errorf("%s: %d of %d packets arrived from %s at %s", names[flow], got[flow], count, flow[0], flow[1])
			}
		}
	}
}

// kubeService is a Service with one endpoint, for UDP and TCP. Without an address it is a NodePort.
type kubeService struct {
	addr     netip.Addr
	port     uint16
	endpoint netip.AddrPort
	// marked is whether all packets are masqueraded, as with externalTrafficPolicy Cluster. Those
	// of the endpoint itself always are.
	marked bool
}

// kubeProxy loads the rules that kube-proxy writes for services of one family in its mode iptables
// or nftables. Like kube-proxy it inserts its jump first.
func (n *node) kubeProxy(t *testing.T, mode string, services []kubeService) {
	t.Helper()
	family := families()[0]
	if services[0].endpoint.Addr().Is6() {
		family = families()[1]
	}
	if mode == "nftables" {
		n.feed(t, kubeProxyNFT(family[1], services), "nft", "-f", "-")
		return
	}
	variant := n.backend.variant
	if variant == "" {
		variant = "nft"
	}
	n.feed(t, kubeProxyIPTables(services), family[0]+"-"+variant+"-restore", "--noflush")
}

func kubeProxyIPTables(services []kubeService) string {
	var chains, rules strings.Builder
	chains.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n:KUBE-POSTROUTING - [0:0]\n")
	rules.WriteString("-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n-I POSTROUTING -j KUBE-POSTROUTING\n" +
		"-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n" +
		"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n" +
		"-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n" +
		"-A KUBE-POSTROUTING -j MASQUERADE --random-fully\n")
	for i, s := range services {
		match, own := "-m addrtype --dst-type LOCAL", " -s "+s.endpoint.Addr().String()
		if s.addr.IsValid() {
			match = "-d " + s.addr.String()
		}
		if s.marked {
			own = ""
		}
		fmt.Fprintf(&chains, ":KUBE-SVC-%d - [0:0]\n", i)
		fmt.Fprintf(&rules, "-A KUBE-SVC-%d%s -j KUBE-MARK-MASQ\n", i, own)
		for _, protocol := range []string{"udp", "tcp"} {
			fmt.Fprintf(&rules, "-A KUBE-SERVICES %s -p %s --dport %d -j KUBE-SVC-%d\n", match, protocol, s.port, i)
			fmt.Fprintf(&rules, "-A KUBE-SVC-%d -p %s -j DNAT --to-destination %s\n", i, protocol, s.endpoint)
		}
	}
	return chains.String() + rules.String() + "COMMIT\n"
}

func kubeProxyNFT(family string, services []kubeService) string {
	var b strings.Builder
	fmt.Fprintf(&b, "table %s kube-proxy {\n", family)
	b.WriteString("chain masquerading {\nmark and 0x4000 == 0 return\nmark set mark xor 0x4000\nmasquerade fully-random\n}\n")
	for i, s := range services {
		own := family + " saddr " + s.endpoint.Addr().String() + " "
		if s.marked {
			own = ""
		}
		fmt.Fprintf(&b, "chain service-%d {\n%smark set mark or 0x4000\nmeta l4proto { tcp, udp } dnat to %s\n}\n", i, own, s.endpoint)
	}
	b.WriteString("chain services {\n")
	for i, s := range services {
		match := "fib daddr type local"
		if s.addr.IsValid() {
			match = family + " daddr " + s.addr.String()
		}
		fmt.Fprintf(&b, "%s meta l4proto { tcp, udp } th dport %d goto service-%d\n", match, s.port, i)
	}
	b.WriteString("}\nchain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }\n" +
		"chain nat-output { type nat hook output priority -100; jump services; }\n" +
		"chain nat-postrouting { type nat hook postrouting priority srcnat; jump masquerading; }\n}\n")
	return b.String()
}
