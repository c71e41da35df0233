// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"fmt"
	"net/netip"
)

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
