// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// SweepUDP sends a packet to every destination, thousands per second, and returns the source
// address seen by each. Every destination is a new flow; lost packets are sent again.
func (h *Host) SweepUDP(to []netip.AddrPort, options ...Option) (map[netip.AddrPort]netip.AddrPort, error) {
	s := newSending(options)
	seen := newSightings(to)
	batch, forget := h.observer.expect(seen.add)
	err := h.Do(func() error {
		sockets, err := h.openSockets(to, s)
		if err != nil {
			return err
		}
		defer sockets.close()
		flow := h.observer.newSendWindow()
		for deadline := time.Now().Add(s.within); ; {
			missing := seen.missing()
			if len(missing) == 0 {
				return nil
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("%d of %d packets were not seen within %s, the first to %s",
					len(missing), len(to), s.within, to[missing[0]])
			}
			for _, i := range missing {
				if err := sockets.send(probe{batch: batch, index: uint32(i), silent: true}, to[i]); err != nil {
					return err
				}
				flow.sent(&seen.arrived)
			}
			seen.await(50 * time.Millisecond)
		}
	})
	forget()
	if err != nil {
		return nil, fmt.Errorf("sweep from %s: %w", h.Name, err)
	}
	return seen.sources, nil
}

// sightings collects the packets seen in a sweep.
type sightings struct {
	to      []netip.AddrPort
	arrived atomic.Int64

	mu      sync.Mutex
	sources map[netip.AddrPort]netip.AddrPort
	// complete is closed when the last destination has been seen.
	complete chan struct{}
	left     int
}

func newSightings(to []netip.AddrPort) *sightings {
	s := &sightings{to: to, sources: make(map[netip.AddrPort]netip.AddrPort, len(to)), complete: make(chan struct{})}
	distinct := map[netip.AddrPort]bool{}
	for _, destination := range to {
		distinct[destination] = true
	}
	s.left = len(distinct)
	return s
}

// add is the sink. A packet seen twice was sent twice.
func (s *sightings) add(index uint32, seen Seen, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arrived.Add(1)
	destination := s.to[index]
	if _, again := s.sources[destination]; again {
		return
	}
	s.sources[destination] = seen.Source
	if s.left--; s.left == 0 {
		close(s.complete)
	}
}

func (s *sightings) missing() []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	var indices []int
	for i, destination := range s.to {
		if _, ok := s.sources[destination]; !ok {
			indices = append(indices, i)
		}
	}
	return indices
}

func (s *sightings) await(patience time.Duration) {
	select {
	case <-s.complete:
	case <-time.After(patience):
	}
}

// sendWindow delays a sender while too many of its probes are in flight.
type sendWindow struct {
	window, count, lost int64
}

func (w *sendWindow) sent(arrived *atomic.Int64) {
	w.count++
	for patience := time.Now().Add(100 * time.Millisecond); w.count-w.lost-arrived.Load() > w.window; {
		if time.Now().After(patience) {
			w.lost = w.count - arrived.Load()
			return
		}
		time.Sleep(20 * time.Microsecond)
	}
}

// sockets has a UDP socket for each family in use, bound to the same port.
type sockets struct {
	byFamily map[bool]int // Is4
	port     uint16
	buffer   [probeLength]byte
}

// openSockets opens the sockets in h's network namespace, which is the current one.
func (h *Host) openSockets(to []netip.AddrPort, s sending) (*sockets, error) {
	deadline := time.Now().Add(s.within)
	for range portCount {
		port := s.port
		if port == 0 {
			port = h.nextPort()
		}
		opened := &sockets{byFamily: map[bool]int{}, port: port}
		var err error
		for i := 0; i < len(to) && err == nil; i++ {
			err = opened.open(to[i].Addr().Is4(), s.address)
		}
		if err == nil {
			return opened, nil
		}
		opened.close()
		if !errors.Is(err, unix.EADDRINUSE) || s.port != 0 && time.Now().After(deadline) {
			return nil, err
		}
		if s.port != 0 { // see Host.dial
			time.Sleep(time.Millisecond)
		}
	}
	return nil, errors.New("all ports are in use")
}

func (s *sockets) open(is4 bool, address netip.Addr) error {
	if _, ok := s.byFamily[is4]; ok {
		return nil
	}
	domain, from := unix.AF_INET, netip.IPv4Unspecified()
	if !is4 {
		domain, from = unix.AF_INET6, netip.IPv6Unspecified()
	}
	if address.IsValid() && address.Is4() == is4 {
		from = address
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	s.byFamily[is4] = fd
	if !is4 {
		// Without it the socket also binds the IPv4 port.
		if err := unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return fmt.Errorf("set socket option: %w", err)
		}
	}
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, s.port))); err != nil {
		return fmt.Errorf("bind socket to port %d: %w", s.port, err)
	}
	return nil
}

func (s *sockets) send(p probe, to netip.AddrPort) error {
	err := unix.Sendto(s.byFamily[to.Addr().Is4()], p.append(s.buffer[:0]), 0, sockaddr(to))
	if err != nil {
		return fmt.Errorf("send to %s: %w", to, err)
	}
	return nil
}

func (s *sockets) close() {
	for _, fd := range s.byFamily {
		_ = unix.Close(fd) // a UDP socket has no unsent data
	}
}
