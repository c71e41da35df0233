// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

// EchoPort is the UDP and TCP port at which every host of a topology answers.
const EchoPort = 7

// Options are the options of a topology.
type Options struct {
	// IsolateOutside gives the outside host routes only to the node's own addresses, as on the
	// Internet, so that a pod without masquerading gets no answer. Without it every address gets an
	// answer, and only the seen address shows masquerading.
	IsolateOutside bool
}

// Topology is a node with its pods and remote hosts. Several goroutines may use it.
type Topology struct {
	// Node forwards both families.
	Node *Host
	// LAN is the host to which the node sends private destinations (RFC 1918, RFC 4193) unless
	// Route changes that. It has routes to the pods.
	LAN *Host
	// Outside is the host behind the node's default route.
	Outside *Host

	suffix   string
	observer *observer
	uplinks  map[*Host]*uplink

	mu    sync.Mutex
	pods  []*Host
	wires int // to pods
}

// uplink is the node's veth pair to a remote host.
type uplink struct {
	node, remote *end
}

// New makes a topology for a test and closes it at the test's end. It fails outside of a sandbox.
func New(t T, options Options) *Topology {
	t.Helper()
	assert.NoError(t, sandbox.Check())
	var suffix [4]byte
	rand.Read(suffix[:]) // never fails
	w := &Topology{
		suffix:   hex.EncodeToString(suffix[:]),
		observer: newObserver(),
		uplinks:  map[*Host]*uplink{},
	}
	t.Cleanup(func() { assert.NoError(t, w.Close()) })
	w.Node = newHost(t, "node", w.suffix, w.observer)
	w.Node.router = w.Node
	for _, sysctl := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		assert.NoError(t, w.Node.Sysctl(sysctl, "1"))
	}
	// In a /31 and a /127 the only other address is the remote host's, and there is no broadcast
	// address, so every other address can be routed.
	w.LAN = w.addRemote(t, "lan", "192.168.50.10", "fd00:50::10")
	w.Outside = w.addRemote(t, "outside", "203.0.113.10", "2001:db8:113::10")
	w.Route(t, w.Outside, everywhere()...)
	w.Route(t, w.LAN, private()...)
	w.routeBack(t, w.LAN)
	if !options.IsolateOutside {
		w.routeBack(t, w.Outside)
	}
	for _, h := range []*Host{w.Node, w.LAN, w.Outside} {
		w.Observe(t, h, EchoPort)
	}
	return w
}

// private returns the prefixes that are routed to the LAN.
func private() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"),
		netip.MustParsePrefix("172.16.0.0/12"),
		netip.MustParsePrefix("192.168.0.0/16"),
		netip.MustParsePrefix("fc00::/7"),
	}
}

// addRemote adds a host with these addresses on a veth pair to the node, which has the next address
// of each.
func (w *Topology) addRemote(t T, name string, addresses ...string) *Host {
	remote := newHost(t, name, w.suffix, w.observer)
	wire := &uplink{
		node:   &end{host: w.Node, device: name, pointToPoint: true},
		remote: &end{host: remote, device: "eth0", pointToPoint: true},
	}
	w.uplinks[remote] = wire
	// The link-local address is first, because awaitAddresses waits for the last one.
	for _, text := range append([]string{"fe80::10"}, addresses...) {
		a := netip.MustParseAddr(text)
		for _, e := range []*end{wire.node, wire.remote} {
			e.addresses = append(e.addresses, a)
			e.host.Addrs = append(e.host.Addrs, a)
			a = a.Next()
		}
	}
	for _, h := range []*Host{w.Node, remote} {
		slices.SortFunc(h.Addrs, netip.Addr.Compare)
	}
	connect(t, wire.node, wire.remote)
	for i := range wire.node.addresses {
		wire.node.neighbor(t, wire.remote.addresses[i], wire.remote)
		wire.remote.neighbor(t, wire.node.addresses[i], wire.node)
	}
	wire.remote.acceptAny(t)
	return remote
}

// Route makes the node route the prefixes to a remote host, LAN or Outside, which then answers
// there.
func (w *Topology) Route(t T, remote *Host, prefixes ...netip.Prefix) {
	t.Helper()
	wire := w.uplinks[remote]
	for _, p := range prefixes {
		wire.node.route(t, p, ofFamily(wire.remote.addresses, p.Addr()))
	}
}

func (w *Topology) routeBack(t T, remote *Host) {
	wire := w.uplinks[remote]
	for _, p := range everywhere() {
		wire.remote.route(t, p, ofFamily(wire.node.addresses, p.Addr()))
	}
}

// NodeAddr returns the node's address on the veth pair to a remote host, of the destination's
// family: the source that the remote host sees of masqueraded packets.
func (w *Topology) NodeAddr(remote *Host, destination netip.Addr) netip.Addr {
	return ofFamily(w.uplinks[remote].node.addresses, destination)
}

// Routable reports whether the topology routes packets of a pod to this address to a remote host.
// It ignores routes and links that a test added.
func (w *Topology) Routable(address netip.Addr) bool {
	switch {
	case !address.IsValid(), address.Is4In6(), address.Zone() != "",
		address.IsUnspecified(), address.IsLoopback(), address.IsMulticast(),
		address.Is6() && address.IsLinkLocalUnicast(),
		address == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return !slices.ContainsFunc(append(w.pods, w.Node), func(h *Host) bool { return h.Has(address) })
}

// Observe makes a host answer at one more port, as at EchoPort.
func (w *Topology) Observe(t T, h *Host, port uint16) {
	t.Helper()
	assert.NoError(t, w.observer.serve(h, port))
}

// Close removes everything that belongs to the topology.
func (w *Topology) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	errs := []error{w.observer.close()}
	for _, h := range append(w.pods, w.LAN, w.Outside, w.Node) {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	return errors.Join(errs...)
}

// gateways are the default gateways of pods. No host has these addresses: the pods have permanent
// neighbor entries for them.
func gateways() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")}
}

// NewPod adds a pod with only a loopback interface, which a CNI plugin can attach to a network. It
// answers at EchoPort.
func (w *Topology) NewPod(t T, name string) *Host {
	t.Helper()
	pod := w.add(newHost(t, name, w.suffix, w.observer))
	w.Observe(t, pod, EchoPort)
	return pod
}

// Adopt makes a host of a network namespace that a runtime created, by its path, so that the host
// can send. It does not answer at EchoPort. The namespace exists until the host is closed.
func (w *Topology) Adopt(t T, name, path string) *Host {
	t.Helper()
	return w.add(adoptHost(t, name, w.suffix, w.observer, path))
}

func (w *Topology) add(pod *Host) *Host {
	pod.router = w.Node
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pods = append(w.pods, pod)
	return pod
}

// AddPod adds a pod with these addresses, without a CNI plugin: a veth pair from its eth0 to the
// node, a route to each address there, and default routes in the pod for the families of its
// addresses.
func (w *Topology) AddPod(t T, name string, addresses ...netip.Addr) *Host {
	t.Helper()
	pod := w.NewPod(t, name)
	w.mu.Lock()
	pod.Addrs = addresses
	w.wires++
	device := fmt.Sprintf("pod%d", w.wires)
	w.mu.Unlock()

	inner := &end{host: pod, device: "eth0", addresses: addresses}
	outer := &end{host: w.Node, device: device}
	connect(t, inner, outer)
	for i, gateway := range gateways() {
		if ofFamily(addresses, gateway).IsValid() {
			inner.neighbor(t, gateway, outer)
			inner.route(t, everywhere()[i], gateway)
		}
	}
	for _, a := range addresses {
		outer.neighbor(t, a, inner)
		outer.route(t, netip.PrefixFrom(a, a.BitLen()), netip.Addr{})
	}
	return pod
}
