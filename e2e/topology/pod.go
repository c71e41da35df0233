// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"fmt"
	"net/netip"
)

// gateways are what pods see as their routers. Nobody has these addresses: the
// pods are told where frames for them go.
func gateways() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")}
}

// NewPod adds a pod without any network but loopback, for a CNI plugin to give
// it one. It answers at EchoPort.
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

// Adopt makes a pod of a network namespace that a runtime has made, by its path,
// so that it can send as the other hosts can. It does not answer at EchoPort by
// itself. The namespace exists until the pod is closed, whatever the runtime does.
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

// AddPod adds a pod with these addresses, without any CNI plugin: a wire from
// its eth0 to the node, a route to each address there, and default routes here
// for the families that it has addresses of.
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
