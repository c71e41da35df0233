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

// Build makes a topology. It fails outside of a sandbox.
func Build(options Options) (*Topology, error) {
	if err := sandbox.Check(); err != nil {
		return nil, fmt.Errorf("build topology: %w", err)
	}
	var suffix [4]byte
	rand.Read(suffix[:]) // never fails
	t := &Topology{
		suffix:   hex.EncodeToString(suffix[:]),
		observer: newObserver(),
		uplinks:  map[*Host]*uplink{},
	}
	if err := t.build(options); err != nil {
		return nil, errors.Join(fmt.Errorf("build topology: %w", err), t.Close())
	}
	return t, nil
}

func (t *Topology) build(options Options) error {
	var err error
	if t.Node, err = newHost("node", t.suffix, t.observer); err != nil {
		return err
	}
	t.Node.router = t.Node
	for _, sysctl := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		if err := t.Node.Sysctl(sysctl, "1"); err != nil {
			return err
		}
	}
	// In a /31 and a /127 the only other address is the remote host's, and there is no broadcast
	// address, so every other address can be routed.
	if t.LAN, err = t.addRemote("lan", "192.168.50.10", "fd00:50::10"); err != nil {
		return err
	}
	if t.Outside, err = t.addRemote("outside", "203.0.113.10", "2001:db8:113::10"); err != nil {
		return err
	}
	if err := t.Route(t.Outside, everywhere()...); err != nil {
		return err
	}
	if err := t.Route(t.LAN, private()...); err != nil {
		return err
	}
	answerable := []*Host{t.LAN, t.Outside}
	if options.IsolateOutside {
		answerable = []*Host{t.LAN}
	}
	for _, remote := range answerable {
		if err := t.routeBack(remote); err != nil {
			return err
		}
	}
	for _, h := range []*Host{t.Node, t.LAN, t.Outside} {
		if err := t.observer.serve(h, EchoPort); err != nil {
			return err
		}
	}
	return nil
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
func (t *Topology) addRemote(name string, addresses ...string) (*Host, error) {
	remote, err := newHost(name, t.suffix, t.observer)
	if err != nil {
		return nil, err
	}
	wire := &uplink{
		node:   &end{host: t.Node, device: name, pointToPoint: true},
		remote: &end{host: remote, device: "eth0", pointToPoint: true},
	}
	t.uplinks[remote] = wire
	// The link-local address is first, because awaitAddresses waits for the last one.
	for _, text := range append([]string{"fe80::10"}, addresses...) {
		a := netip.MustParseAddr(text)
		for _, e := range []*end{wire.node, wire.remote} {
			e.addresses = append(e.addresses, a)
			e.host.Addrs = append(e.host.Addrs, a)
			a = a.Next()
		}
	}
	for _, h := range []*Host{t.Node, remote} {
		slices.SortFunc(h.Addrs, netip.Addr.Compare)
	}
	if err := connect(wire.node, wire.remote); err != nil {
		return remote, err
	}
	for i := range wire.node.addresses {
		if err := wire.node.neighbor(wire.remote.addresses[i], wire.remote); err != nil {
			return remote, err
		}
		if err := wire.remote.neighbor(wire.node.addresses[i], wire.node); err != nil {
			return remote, err
		}
	}
	return remote, wire.remote.acceptAny()
}

// Route makes the node route the prefixes to a remote host, LAN or Outside, which then answers
// there.
func (t *Topology) Route(remote *Host, prefixes ...netip.Prefix) error {
	wire, ok := t.uplinks[remote]
	if !ok {
		return fmt.Errorf("route to %s: not LAN or Outside", remote.Name)
	}
	for _, p := range prefixes {
		if err := wire.node.route(p, ofFamily(wire.remote.addresses, p.Addr())); err != nil {
			return err
		}
	}
	return nil
}

func (t *Topology) routeBack(remote *Host) error {
	wire := t.uplinks[remote]
	for _, p := range everywhere() {
		if err := wire.remote.route(p, ofFamily(wire.node.addresses, p.Addr())); err != nil {
			return err
		}
	}
	return nil
}

// NodeAddr returns the node's address on the veth pair to a remote host, of the destination's
// family: the source that the remote host sees of masqueraded packets.
func (t *Topology) NodeAddr(remote *Host, destination netip.Addr) netip.Addr {
	return ofFamily(t.uplinks[remote].node.addresses, destination)
}

// Routable reports whether the topology routes packets of a pod to this address to a remote host.
// It ignores routes and links that a test added.
func (t *Topology) Routable(address netip.Addr) bool {
	switch {
	case !address.IsValid(), address.Is4In6(), address.Zone() != "",
		address.IsUnspecified(), address.IsLoopback(), address.IsMulticast(),
		address.Is6() && address.IsLinkLocalUnicast(),
		address == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return !slices.ContainsFunc(append(t.pods, t.Node), func(h *Host) bool { return h.Has(address) })
}

// Observe makes a host answer at one more port, as at EchoPort.
func (t *Topology) Observe(h *Host, port uint16) error {
	return t.observer.serve(h, port)
}

// Close removes everything that belongs to the topology.
func (t *Topology) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	errs := []error{t.observer.close()}
	for _, h := range append(t.pods, t.LAN, t.Outside, t.Node) {
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
func (t *Topology) NewPod(name string) (*Host, error) {
	pod, err := newHost(name, t.suffix, t.observer)
	if err != nil {
		return nil, err
	}
	pod.router = t.Node
	t.mu.Lock()
	t.pods = append(t.pods, pod)
	t.mu.Unlock()
	return pod, t.observer.serve(pod, EchoPort)
}

// Adopt makes a host of a network namespace that a runtime created, by its path, so that the host
// can send. It does not answer at EchoPort. The namespace exists until the host is closed.
func (t *Topology) Adopt(name, path string) (*Host, error) {
	pod, err := adoptHost(name, t.suffix, t.observer, path)
	if err != nil {
		return nil, err
	}
	pod.router = t.Node
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pods = append(t.pods, pod)
	return pod, nil
}

// AddPod adds a pod with these addresses, without a CNI plugin: a veth pair from its eth0 to the
// node, a route to each address there, and default routes in the pod for the families of its
// addresses.
func (t *Topology) AddPod(name string, addresses ...netip.Addr) (*Host, error) {
	pod, err := t.NewPod(name)
	if err != nil {
		return pod, err
	}
	t.mu.Lock()
	pod.Addrs = addresses
	t.wires++
	device := fmt.Sprintf("pod%d", t.wires)
	t.mu.Unlock()

	inner := &end{host: pod, device: "eth0", addresses: addresses}
	outer := &end{host: t.Node, device: device}
	if err := connect(inner, outer); err != nil {
		return pod, err
	}
	for i, gateway := range gateways() {
		if !ofFamily(addresses, gateway).IsValid() {
			continue
		}
		if err := inner.neighbor(gateway, outer); err != nil {
			return pod, err
		}
		if err := inner.route(everywhere()[i], gateway); err != nil {
			return pod, err
		}
	}
	for _, a := range addresses {
		if err := outer.neighbor(a, inner); err != nil {
			return pod, err
		}
		if err := outer.route(netip.PrefixFrom(a, a.BitLen()), netip.Addr{}); err != nil {
			return pod, err
		}
	}
	return pod, nil
}
