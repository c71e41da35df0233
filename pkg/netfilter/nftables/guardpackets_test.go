// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// guarded is a node with a pod, in both families, and with the tables of guards.
type guarded struct {
	*testing.T
	*topology.Topology
	pod    *topology.Host
	driver *Driver
}

func newGuarded(t *testing.T, edit ...func(*policy.Guard)) *guarded {
	g := &guarded{T: t, Topology: topology.New(t, topology.Options{}), driver: New()}
	g.pod = g.AddPod(t, "pod", netip.MustParseAddr("10.88.0.2"), netip.MustParseAddr("fd00:88::2"))
	t.Cleanup(func() {
		assert.NoError(t, g.driver.Close())
	})
	assert.NoError(t, g.Node.Do(func() error {
		return g.driver.ApplyGuards(t.Context(), guardsOf("X", edit...), netfilter.GuardObservation{})
	}))
	return g
}

func (g *guarded) nft(script string) {
	g.Helper()
	cmd := g.Node.Command(g.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	assert.Output(g, cmd)
}

// counted returns the packets that the guards of both families counted.
func (g *guarded) counted() uint64 {
	g.Helper()
	o := assert.Must(g.driver.ObserveGuards(g.Context()))(g)
	return o.Packets[policy.ChainFamily{Chain: "X", Family: policy.IPv4}] + o.Packets[policy.ChainFamily{Chain: "X", Family: policy.IPv6}]
}

// source sends a packet and returns the source that its receiver saw, or the zero Addr if none did.
func (g *guarded) source(from *topology.Host, to string, answered bool) netip.Addr {
	g.Helper()
	seen, err := from.SendUDP(netip.AddrPortFrom(netip.MustParseAddr(to), topology.EchoPort), topology.Within(500*time.Millisecond))
	if answered && !seen.Answered {
		g.Errorf("%s to %s: no answer: %+v, %v", from.Name, to, seen, err)
	}
	return seen.Source.Addr()
}

// TestGuardPackets: a node without NAT rules. Packets to multicast addresses are not counted. What should
// have been masqueraded is counted, and dropped: also to a destination to which table main has no route, only
// a table that a rule names for the pods' interface. For IPv6 the type of such a destination is unreachable.
func TestGuardPackets(t *testing.T) {
	for _, mode := range []policy.GuardMode{policy.GuardCount, policy.GuardDrop} {
		t.Run(string(mode), func(t *testing.T) {
			g := newGuarded(t, func(g *policy.Guard) { g.Mode, g.Bound = mode, nil })
			for _, family := range []struct {
				option, pod, outside string
				multicast            []string
			}{
				{"-4", "10.88.0.2", "198.51.100.7", []string{"239.1.1.1", "224.0.0.251", "255.255.255.255"}},
				{"-6", "fd00:88::2", "2001:db8:99::7", []string{"ff0e::1", "ff02::fb"}},
			} {
				before := g.counted()
				for _, to := range family.multicast {
					g.sendAs(netip.MustParseAddr(family.pod), to)
				}
				assert.Equal(t, fmt.Sprintf("packets to multicast addresses from %s that were counted", family.pod), g.counted()-before, 0)
				script := `ip $1 route add table 100 $(ip $1 route show default) && ip $1 route del default && ip $1 rule add iif pod1 lookup 100`
				assert.Output(t, g.Node.Command(t.Context(), "sh", "-exc", script, "sh", family.option))
				before = g.counted()
				want := map[policy.GuardMode]netip.Addr{policy.GuardCount: netip.MustParseAddr(family.pod)}[mode]
				assert.Equal(t, fmt.Sprintf("untranslated, from %s: the other side saw", family.pod), g.source(g.pod, family.outside, false), want)
				if g.counted() == before {
					t.Errorf("from %s: no packet was counted", family.pod)
				}
			}
			// Another program translates to an address that is a pod's and not the node's.
			g.nft("table ip other { chain post { type nat hook postrouting priority 100; snat to 10.88.0.77; }; }")
			before := g.counted()
			if got := g.source(g.pod, "203.0.113.11", false); got.IsValid() != (mode == policy.GuardCount) {
				t.Errorf("translated to a pod's address: seen %s", got)
			}
			if g.counted() == before {
				t.Error("a packet that is translated to a pod's address was not counted")
			}
		})
	}
}

// sendAs sends a datagram from the node with the source address of a pod.
func (g *guarded) sendAs(pod netip.Addr, to string) {
	g.Helper()
	if err := g.Node.Do(func() error {
		family, level, option := unix.AF_INET, unix.SOL_IP, unix.IP_TRANSPARENT
		if pod.Is6() {
			family, level, option = unix.AF_INET6, unix.SOL_IPV6, unix.IPV6_TRANSPARENT
		}
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		device, err := net.InterfaceByName("outside")
		if err != nil {
			return err
		}
		address := func(a netip.Addr, port int) unix.Sockaddr {
			if a.Is4() {
				return &unix.SockaddrInet4{Addr: a.As4(), Port: port}
			}
			return &unix.SockaddrInet6{Addr: a.As16(), Port: port, ZoneId: uint32(device.Index)}
		}
		return errors.Join(
			unix.SetsockoptInt(fd, level, option, 1),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1),
			unix.BindToDevice(fd, device.Name),
			unix.Bind(fd, address(pod, 0)),
			unix.Sendto(fd, []byte("multicast"), 0, address(netip.MustParseAddr(to), 5353)))
	}); err != nil {
		g.Fatalf("%s to %s: %v", pod, to, err)
	}
}

// TestEnforceSelf: a connection of a pod to itself by IPVS is left to another program's rule, and the
// elements of the set that tells are no drift.
func TestEnforceSelf(t *testing.T) {
	edit := func(g *policy.Guard) { g.Mode, g.Exempt = policy.GuardOff, nil }
	g := newGuarded(t, edit)
	g.nft(`table inet other {
		chain ipvs { type filter hook prerouting priority -150; comment "as IPVS: translated, without ct status dnat"
			ip daddr 10.96.0.2 ip daddr set 10.88.0.2
			ip6 daddr fd00:96::2 ip6 daddr set fd00:88::2
		}
		chain post { type nat hook postrouting priority 100; masquerade
		}
	}`)
	for family, self := range map[string]struct{ pod, service string }{"ip": {"10.88.0.2", "10.96.0.2"}, "ip6": {"fd00:88::2", "fd00:96::2"}} {
		if got := g.source(g.pod, self.service, false); got == netip.MustParseAddr(self.pod) || !got.IsValid() {
			t.Errorf("to itself by IPVS: seen %s", got)
		}
		out, err := g.Node.Command(t.Context(), "nft", "list", "set", family, netfilter.GuardTable, selfSet).CombinedOutput()
		if err != nil || !strings.Contains(string(out), self.pod+" . "+self.pod) {
			t.Errorf("set self: %v\n%s", err, out)
		}
	}
	o := assert.Must(g.driver.ObserveGuards(t.Context()))(t)
	if d := g.driver.CompareGuards(guardsOf("X", edit), o); len(d) > 0 {
		t.Errorf("elements of self are drift:\n%s", d)
	}
}

// TestBypassMark: packets with any of the mark's bits keep what another program translates them to. The other
// connections are counted.
func TestBypassMark(t *testing.T) {
	bits, bound := []policy.Mark{0x2000, 0x4000, 0x8000}, map[policy.ChainFamily]uint64{}
	g := newGuarded(t)
	g.nft(`table inet other {
		chain marks { type filter hook forward priority 0;
			ip daddr & 0.0.0.255 vmap { 0.0.0.0 : jump bit0, 0.0.0.1 : jump bit1, 0.0.0.2 : jump bit2 }
			ip6 daddr & ::ffff vmap { :: : jump bit0, ::1 : jump bit1, ::2 : jump bit2 }
		}
		chain bit0 { meta mark set 0x2000; }
		chain bit1 { meta mark set 0x4000; }
		chain bit2 { meta mark set 0x8000; }
		chain post { type nat hook postrouting priority 100; masquerade; }
	}`)
	for i, bypass := range []policy.Mark{0x6000, 0xa000, 0x2000, 0x8001, 0} {
		observed, err := g.driver.ObserveGuards(t.Context())
		if err == nil {
			err = g.driver.ApplyGuards(t.Context(), guardsOf("X", func(g *policy.Guard) { g.Mode, g.Exempt, g.BypassMark = policy.GuardOff, nil, bypass }), observed)
		}
		assert.NoError(t, err)
		for j, bit := range bits {
			for pod, to := range map[string]string{"10.88.0.2": fmt.Sprintf("10.7.%d.%d", i+1, j), "fd00:88::2": fmt.Sprintf("fd00:7::%d:%d", i+1, j)} {
				want := netip.MustParseAddr(pod)
				if bypass&bit != 0 {
					want = g.NodeAddr(g.LAN, want)
				} else {
					bound[policy.ChainFamily{Chain: "X", Family: policy.FamilyOf(want)}]++
				}
				assert.Equal(t, fmt.Sprintf("bypassMark %s, packet to %s with mark %s: seen", bypass, to, bit), g.source(g.pod, to, true), want)
			}
		}
	}
	o, err := g.driver.ObserveGuards(t.Context())
	if diff := cmp.Diff(bound, o.Bound); diff != "" || err != nil {
		t.Errorf("%v, bound connections (-want +got):\n%s", err, diff)
	}
}
