// SPDX-License-Identifier: Apache-2.0

package topology_test

import (
	"net/netip"
	"os"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

func addr(text string) netip.Addr { return netip.MustParseAddr(text) }

// echo returns the address with EchoPort.
func echo(text string) netip.AddrPort {
	return netip.AddrPortFrom(addr(text), topology.EchoPort)
}

// world returns a topology with one pod.
func world(t *testing.T, options topology.Options) (*topology.Topology, *topology.Host) {
	t.Helper()
	w := topology.New(t, options)
	return w, w.AddPod(t, "pod", addr("10.244.1.2"), addr("fd00:244:1::2"))
}

// podAddr returns the pod's address of the destination's family.
func podAddr(pod *topology.Host, destination netip.Addr) netip.Addr {
	if destination.Is4() {
		return pod.Addrs[0]
	}
	return pod.Addrs[1]
}

// TestWhatIsRoutableIsSeen checks Routable, on which tests of random policies rely.
func TestWhatIsRoutableIsSeen(t *testing.T) {
	w, pod := world(t, topology.Options{})
	rapid.Check(t, func(t *rapid.T) {
		var to []netip.AddrPort
		for range 100 {
			if a := anyAddr(t); w.Routable(a) {
				to = append(to, netip.AddrPortFrom(a, topology.EchoPort))
			}
		}
		seen := assert.Must(pod.SweepUDP(to))(t)
		for destination, source := range seen {
			assert.Equal(t, "to "+destination.String()+": seen", source.Addr(), podAddr(pod, destination.Addr()))
		}
	})
	for _, text := range []string{
		"0.0.0.0", "::", "127.0.0.1", "::1", "224.0.0.1", "ff02::1", "255.255.255.255", "fe80::11", "fe80::11%lan",
		"::ffff:1.2.3.4", "192.168.50.10", "2001:db8:113::10", "10.244.1.2", "fd00:244:1::2",
	} {
		if w.Routable(addr(text)) {
			t.Errorf("%s is said to be routable", text)
		}
	}
}

// anyAddr returns a random address, often near the start of a special range.
func anyAddr(t *rapid.T) netip.Addr {
	if rapid.Bool().Draw(t, "special") {
		a := addr(rapid.SampledFrom([]string{
			"0.0.0.0", "10.0.0.0", "100.64.0.0", "127.0.0.0", "169.254.1.0", "172.16.0.0", "192.0.0.0", "192.88.99.0",
			"192.168.50.8", "198.18.0.0", "203.0.113.8", "224.0.0.0", "240.0.0.0", "255.255.255.250",
			"::", "::ffff:0.0.0.0", "64:ff9b::", "64:ff9b:1::", "100::", "2001::", "2001:db8:113::", "2002::", "3fff::",
			"fc00::", "fd00:50::8", "fe80::", "fec0::", "ff00::",
		}).Draw(t, "range"))
		for range rapid.IntRange(0, 20).Draw(t, "offset") {
			a = a.Next()
		}
		return a
	}
	length := rapid.SampledFrom([]int{4, 16}).Draw(t, "length")
	a, _ := netip.AddrFromSlice(rapid.SliceOfN(rapid.Byte(), length, length).Draw(t, "bytes"))
	return a
}

func TestBuildRefusesTheMachinesOwnNetwork(t *testing.T) {
	t.Setenv("IPMASQ_SANDBOX", "")
	err := topology.Run(func(t topology.T) { topology.New(t, topology.Options{}) })
	assert.ErrorContains(t, err, "sandbox.Run")
}

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

// TestWhatNobodySeesIsAnError sends to an address without a server.
func TestWhatNobodySeesIsAnError(t *testing.T) {
	_, pod := world(t, topology.Options{})
	to := netip.AddrPortFrom(addr("1.2.3.4"), topology.EchoPort+1)
	_, udp := pod.SendUDP(to, topology.Within(20*time.Millisecond))
	_, tcp := pod.SendTCP(to, topology.Within(20*time.Millisecond))
	_, sweep := pod.SweepUDP([]netip.AddrPort{echo("1.2.3.5"), to}, topology.Within(20*time.Millisecond))
	assert.ErrorContains(t, udp, pod.Name)
	assert.ErrorContains(t, tcp, pod.Name)
	assert.ErrorContains(t, sweep, pod.Name, "1 of 2 packets", to.String())
}
