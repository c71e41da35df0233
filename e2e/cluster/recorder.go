// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// StreamPort is the port at which the LAN and the outside record packets of peers.
const StreamPort = 9

// Packet is a received packet of a peer.
type Packet struct {
	At time.Time
	// By is the receiver, lan or outside.
	By string
	// Self is the sender's own address, before any translation.
	Self netip.Addr
	To   netip.AddrPort
	// Source is the seen source address.
	Source netip.Addr
}

// String formats the packet for messages.
func (p Packet) String() string {
	return fmt.Sprintf("%s %s received from %s what %s sent to %s", p.At.Format("15:04:05.000"), p.By, p.Source, p.Self, p.To)
}

// Recorder records every packet that the LAN and the outside receive at StreamPort. It never
// answers.
type Recorder struct {
	mu      sync.Mutex
	packets []Packet
	broken  []string
}

// Record starts a recorder until the test ends.
func (c *Cluster) Record(t T) *Recorder {
	t.Helper()
	r := &Recorder{}
	var receiving sync.WaitGroup
	var open []io.Closer
	t.Cleanup(func() {
		for _, conn := range open {
			_ = conn.Close()
		}
		receiving.Wait()
	})
	for _, host := range []*topology.Host{c.World.LAN, c.World.Outside} {
		var conn net.PacketConn
		assert.NoError(t, host.Do(func() (err error) {
			conn, err = net.ListenPacket("udp4", fmt.Sprintf(":%d", StreamPort))
			return err
		}))
		open = append(open, conn)
		receiving.Go(func() { r.receive(host.Name, conn) })
	}
	return r
}

func (r *Recorder) receive(by string, conn net.PacketConn) {
	buffer := make([]byte, 512)
	for {
		n, from, err := conn.ReadFrom(buffer)
		if err != nil {
			return // closed
		}
		p := Packet{At: time.Now(), By: by, Source: from.(*net.UDPAddr).AddrPort().Addr().Unmap()}
		self, to, _ := strings.Cut(string(buffer[:n]), " ")
		var errSelf, errTo error
		p.Self, errSelf = netip.ParseAddr(self)
		p.To, errTo = netip.ParseAddrPort(to)
		r.mu.Lock()
		if errSelf != nil || errTo != nil {
			r.broken = append(r.broken, fmt.Sprintf("%s received %q from %s", by, buffer[:n], from))
		} else {
			r.packets = append(r.packets, p)
		}
		r.mu.Unlock()
	}
}

// Since returns the packets received since a time, in order.
func (r *Recorder) Since(moment time.Time) []Packet {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, p := range r.packets {
		if !p.At.Before(moment) {
			return append([]Packet(nil), r.packets[i:]...)
		}
	}
	return nil
}

// Wrong returns the packets since a time with a wrong source address, and those that cannot be
// parsed. The LAN and exempt destinations must see the pod's address, other outside destinations
// the node's.
func (c *Cluster) Wrong(r *Recorder, moment time.Time, exempt ...netip.Prefix) []string {
	var wrong []string
	for _, p := range r.Since(moment) {
		want := p.Self
		isExempt := slices.ContainsFunc(exempt, func(e netip.Prefix) bool { return e.Contains(p.To.Addr()) })
		if p.By == c.World.Outside.Name && !isExempt {
			want = c.nodeOf(p.Self)
		}
		if p.Source != want {
			wrong = append(wrong, fmt.Sprintf("%s; want %s", p, want))
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return append(wrong, r.broken...)
}

// nodeOf returns the address of the node that has this address or a pod with it.
func (c *Cluster) nodeOf(address netip.Addr) netip.Addr {
	for _, n := range c.Nodes {
		if n.Pods.Contains(address) {
			return n.Address
		}
	}
	return address
}

// Flow is a protocol, udp or tcp, and a destination.
type Flow struct {
	Protocol string
	To       netip.AddrPort
}

// String returns the flow as an argument of the program pod.
func (f Flow) String() string { return f.Protocol + ":" + f.To.String() }

// Seen is what the receiver saw of a flow.
type Seen struct {
	// By is the receiver's name.
	By string
	// Source is the source address of the flow.
	Source netip.Addr
	// Failure is the reason for a missing answer, else empty.
	Failure string
}

// Sender runs the program pod and returns its standard output.
type Sender func(ctx context.Context, args ...string) (string, error)

// FromPod sends from a pod in the namespace default.
func (c *Cluster) FromPod(name string) Sender {
	return func(ctx context.Context, args ...string) (string, error) {
		return c.Kubectl(ctx, append([]string{"exec", name, "--", "/pod"}, args...)...)
	}
}

// FromHost sends from a host outside the cluster.
func (c *Cluster) FromHost(host *topology.Host) Sender {
	return func(ctx context.Context, args ...string) (string, error) {
		output, err := host.Command(ctx, filepath.Join(c.directory, "pod"), args...).Output()
		return string(output), err
	}
}

// Ask sends each flow once and returns what the receivers saw.
func (s Sender) Ask(t T, flows ...Flow) map[Flow]Seen {
	t.Helper()
	args := []string{"ask"}
	for _, f := range flows {
		args = append(args, f.String())
	}
	output := assert.Must(s(t.Context(), args...))(t)
	lines := strings.Split(strings.TrimSpace(output), "\n")
	if len(lines) != len(flows) {
		t.Fatalf("%d answers for %d flows: %s", len(lines), len(flows), output)
	}
	seen := map[Flow]Seen{}
	for i, f := range flows {
		by, rest, _ := strings.Cut(strings.TrimPrefix(lines[i], f.String()+" "), " ")
		if by == "-" {
			seen[f] = Seen{Failure: rest}
			continue
		}
		seen[f] = Seen{By: by, Source: assert.Must(netip.ParseAddrPort(rest))(t).Addr().Unmap()}
	}
	return seen
}
