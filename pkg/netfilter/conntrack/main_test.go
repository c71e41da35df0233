// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

// namespace makes a network namespace whose loopback interface has the addresses.
func namespace(t testing.TB, addresses ...string) {
	t.Helper()
	sandbox.NetworkNamespace(t)
	lo := assert.Must(netlink.LinkByName("lo"))(t)
	assert.NoError(t, netlink.LinkSetUp(lo))
	for _, text := range addresses {
		a := assert.Must(netlink.ParseAddr(text))(t)
		assert.NoError(t, netlink.AddrAdd(lo, a))
		// The kernel adds the local route of an IPv6 address a little later.
		if !timelimit.Await(timelimit.Wait, func() bool {
			routes, err := netlink.RouteGet(a.IP)
			return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
		}) {
			t.Fatalf("%s does not become local", text)
		}
	}
}

// entry makes a conntrack entry: "10.88.0.2 > 192.0.2.1" is answered, and seen, as it is sent; seen and
// endpoint may differ.
func entry(protocol uint8, port uint16, src, dst, endpoint, seen string) fixtures.Connection {
	at := func(a string, port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(a), port) }
	serverPort := uint16(53)
	if protocol == unix.IPPROTO_ICMP || protocol == unix.IPPROTO_ICMPV6 {
		serverPort = 0
	}
	return fixtures.Connection{
		Protocol: protocol, Src: at(src, port), Dst: at(dst, serverPort),
		ReplySrc: at(endpoint, serverPort), ReplyDst: at(seen, port),
	}
}

func add(t testing.TB, entries ...fixtures.Connection) {
	t.Helper()
	assert.NoError(t, fixtures.AddConnections(len(entries), func(i int) fixtures.Connection { return entries[i] }))
}

// sources returns the original sources of the entries in the namespace.
func sources(t testing.TB) (list []string) {
	t.Helper()
	assert.NoError(t, dial(t).Connections(t.Context(), nfnetlink.ConnectionFilter{}, func(e *nfnetlink.Connection) error {
		list = append(list, fmt.Sprint(e.Original.Src))
		return nil
	}))
	slices.Sort(list)
	return list
}

var prefixes = policytest.Prefixes

// merged returns the policy of a network with pods 10.88.0.0/16 and fd88::/64 that exempts the prefixes.
func merged(change func(*policy.SourcePolicy), exempt ...string) []policy.Policy {
	s := policy.SourcePolicy{
		Chain: policy.DefaultChain, EnableIPv6: new(true), PodCIDRs: prefixes("10.88.0.0/16", "fd88::/64"),
		StaleConnections: policy.ResetConnections, NonMasqueradeCIDRs: prefixes(exempt...),
	}
	if change != nil {
		change(&s)
	}
	return policy.Merge([]policy.Source{{ID: policy.SourceID{Kind: policy.Network, Name: "podnet"}, Policy: s}})
}

// addVeth adds a veth pair whose end of that name has the addresses.
func addVeth(t testing.TB, name string, addresses ...string) *netlink.Veth {
	t.Helper()
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-peer"}
	assert.NoError(t, netlink.LinkAdd(link))
	peer, err := netlink.LinkByName(link.PeerName)
	if err == nil {
		err = errors.Join(netlink.LinkSetUp(link), netlink.LinkSetUp(peer))
	}
	assert.NoError(t, err)
	for _, text := range addresses {
		a, err := netlink.ParseAddr(text)
		if err == nil {
			a.Flags = unix.IFA_F_NODAD
			err = netlink.AddrAdd(link, a)
		}
		if err != nil {
			t.Fatalf("add %s: %v", text, err)
		}
	}
	return link
}

// fill adds every step-th of n entries of pods: every hundredth to 192.0.2.0/24, translated or not, all
// others to 198.51.100.0/24 and translated.
func fill(t testing.TB, n, step int, translated bool) {
	t.Helper()
	assert.NoError(t, fixtures.AddConnections(n/step, func(i int) fixtures.Connection {
		i *= step
		pod := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 88, byte(i >> 7), byte(i & 127)}), uint16(1024+i>>15))
		node := netip.AddrPortFrom(netip.MustParseAddr("203.0.113.1"), uint16(1024+i>>8))
		server := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 443)
		if i%100 == 0 {
			server = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 443)
			if !translated {
				node = pod
			}
		}
		return fixtures.Connection{Protocol: unix.IPPROTO_UDP, Src: pod, Dst: server, ReplySrc: server, ReplyDst: node}
	}))
}
