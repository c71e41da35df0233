// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// Option changes how a probe is sent.
type Option func(*sending)

type sending struct {
	address netip.Addr
	port    uint16
	within  time.Duration
}

// FromAddr sends from one of the host's addresses instead of the one that the kernel chooses.
func FromAddr(a netip.Addr) Option { return func(s *sending) { s.address = a } }

// FromPort sends from a port. By default each flow gets the host's next port, so that it is new to
// connection tracking. With FromPort the kernel refuses a second TCP connection to the same
// destination for a minute.
func FromPort(port uint16) Option { return func(s *sending) { s.port = port } }

// Within sets the timeout, for a packet that may be dropped; the default is that of whatever a test waits for.
func Within(d time.Duration) Option { return func(s *sending) { s.within = d } }

func newSending(options []Option) sending {
	s := sending{within: timelimit.Wait}
	for _, o := range options {
		o(&s)
	}
	return s
}

// SendUDP sends a packet and returns what the receiver saw, with or without an answer. It resends
// the packet until the receiver has seen it; that does not start a second flow.
func (h *Host) SendUDP(to netip.AddrPort, options ...Option) (Seen, error) {
	s := newSending(options)
	deadline := time.Now().Add(s.within)
	type sighting struct {
		Seen
		answered bool
	}
	sightings := make(chan sighting, 1)
	batch, forget := h.observer.expect(func(_ uint32, seen Seen, unanswered error) {
		select {
		case sightings <- sighting{seen, unanswered == nil}:
		default: // sent again
		}
	})
	defer forget()

	conn, err := h.dial("udp", to, s)
	if err != nil {
		return Seen{}, err
	}
	defer func() { _ = conn.Close() }()
	payload := probe{batch: batch}.append(nil)
	for time.Now().Before(deadline) {
		// The error can be the ICMP error for the previous packet.
		if _, err := conn.Write(payload); err != nil {
			return Seen{}, fmt.Errorf("send from %s: %w", h.Name, err)
		}
		select {
		case s := <-sightings:
			s.Answered = s.answered && answered(conn, payload, deadline)
			return s.Seen, nil
		case <-time.After(min(again, time.Until(deadline))):
		}
	}
	return Seen{}, fmt.Errorf("send udp from %s to %s: not seen within %s", h.Name, to, s.within)
}

// again is the time after which a packet counts as lost.
const again = 200 * time.Millisecond

// answered waits for any answer until the deadline.
func answered(conn net.Conn, payload []byte, deadline time.Time) bool {
	answer := make([]byte, 512)
	for time.Now().Before(deadline) {
		patience := time.Now().Add(again)
		if patience.After(deadline) {
			patience = deadline
		}
		if conn.SetReadDeadline(patience) != nil {
			return false
		}
		_, err := conn.Read(answer)
		if err == nil {
			return true
		}
		if _, err := conn.Write(payload); err != nil {
			return false
		}
	}
	return false
}

// SendTCP opens and closes a connection and returns what the receiver saw.
func (h *Host) SendTCP(to netip.AddrPort, options ...Option) (Seen, error) {
	conn, err := h.OpenTCP(to, options...)
	if err != nil {
		return Seen{}, err
	}
	return conn.Seen, conn.Close()
}

// Conn is an open TCP connection.
type Conn struct {
	net.Conn
	// Seen is what the receiver saw when the connection was opened.
	Seen Seen

	answers *bufio.Reader
	within  time.Duration
}

// OpenTCP opens a connection that stays open, for tests that change rules meanwhile.
func (h *Host) OpenTCP(to netip.AddrPort, options ...Option) (*Conn, error) {
	s := newSending(options)
	raw, err := h.dial("tcp", to, s)
	if err != nil {
		return nil, err
	}
	conn := &Conn{Conn: raw, answers: bufio.NewReader(raw), within: s.within}
	if conn.Seen, err = conn.read(); err != nil {
		return nil, errors.Join(err, raw.Close())
	}
	return conn, nil
}

// Ask sends a line over the connection and returns what the receiver sees.
func (c *Conn) Ask() (Seen, error) {
	if _, err := c.Write([]byte("\n")); err != nil {
		return Seen{}, err
	}
	return c.read()
}

func (c *Conn) read() (Seen, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.within)); err != nil {
		return Seen{}, err
	}
	line, err := c.answers.ReadString('\n')
	if err != nil {
		return Seen{}, fmt.Errorf("read answer: %w", err)
	}
	return parseAnswer(line)
}

// dial opens a socket on the host, from the next port unless s sets one.
func (h *Host) dial(network string, to netip.AddrPort, s sending) (net.Conn, error) {
	to, err := h.numericZone(to)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.within)
	defer cancel()
	for range 1 << 16 {
		port := s.port
		if port == 0 {
			port = h.nextPort()
		}
		var conn net.Conn
		err = h.Do(func() error {
			dialer := net.Dialer{
				LocalAddr: localAddr(network, netip.AddrPortFrom(s.address, port)),
				Control:   reusable,
			}
			conn, err = dialer.DialContext(ctx, network, to.String())
			return err
		})
		if errors.Is(err, unix.EADDRINUSE) && ctx.Err() == nil {
			if s.port != 0 { // a process that this one forks has its sockets until it calls execve(2), closed ones too
				time.Sleep(time.Millisecond)
			}
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("open %s connection from %s: %w", network, h.Name, err)
		}
		return conn, nil
	}
	return nil, fmt.Errorf("open %s connection from %s: all ports are in use", network, h.Name)
}

// reusable lets a TCP socket reuse the port of an ended connection for another destination.
func reusable(network, _ string, socket syscall.RawConn) error {
	if !strings.HasPrefix(network, "tcp") {
		return nil
	}
	var set error
	err := socket.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	return errors.Join(err, set)
}

// localAddr returns the local address; without an address the kernel chooses one.
func localAddr(network string, a netip.AddrPort) net.Addr {
	if network == "udp" {
		return net.UDPAddrFromAddrPort(a)
	}
	return net.TCPAddrFromAddrPort(a)
}

// numericZone replaces the zone of a link-local address, a device of the host, by its index.
// Package net would cache the index of the first network namespace that asks.
func (h *Host) numericZone(to netip.AddrPort) (netip.AddrPort, error) {
	zone := to.Addr().Zone()
	if zone == "" {
		return to, nil
	}
	link, err := h.Netlink.LinkByName(zone)
	if err != nil {
		return to, fmt.Errorf("find zone of %s on %s: %w", to, h.Name, err)
	}
	return netip.AddrPortFrom(to.Addr().WithZone(strconv.Itoa(link.Attrs().Index)), to.Port()), nil
}

// sockaddr requires that a zone is numeric.
func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	zone, err := strconv.ParseUint(a.Addr().Zone(), 10, 32)
	if err != nil {
		zone = 0
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16(), ZoneId: uint32(zone)}
}

const (
	firstPort = 1024
	portCount = 1<<16 - firstPort
)

func (h *Host) nextPort() uint16 {
	return uint16(firstPort + (h.port.Add(1)-1)%portCount)
}

// Seen is what the receiving host saw of a flow.
type Seen struct {
	// By is the name of that host.
	By string
	// Source is the source address and port of the flow.
	Source netip.AddrPort
	// Answered reports whether the answer arrived at the sender. With TCP it is always true.
	Answered bool
}

// answer returns the answer of a host to a peer: "outside 192.0.2.1:1024".
func answer(host *Host, source netip.AddrPort) []byte {
	return fmt.Appendf(nil, "%s %s\n", host.Name, source)
}

func parseAnswer(line string) (Seen, error) {
	name, address, _ := strings.Cut(strings.TrimSpace(line), " ")
	source, err := netip.ParseAddrPort(address)
	if err != nil {
		return Seen{}, fmt.Errorf("parse answer %q: %w", line, err)
	}
	return Seen{By: name, Source: source, Answered: true}, nil
}

// probe is the payload of a UDP packet that the observer recognizes. The observer passes it to the
// sink of its batch within this process, so no answer is needed.
type probe struct {
	batch uint32
	index uint32
	// silent probes ask for no answer.
	silent bool
}

// probeMagic is the prefix of a probe.
const (
	probeMagic  = "\x00imp"
	probeLength = len(probeMagic) + 4 + 4 + 1
)

func (p probe) append(b []byte) []byte {
	b = append(b, probeMagic...)
	b = binary.BigEndian.AppendUint32(b, p.batch)
	b = binary.BigEndian.AppendUint32(b, p.index)
	if p.silent {
		return append(b, 1)
	}
	return append(b, 0)
}

func parseProbe(payload []byte) (p probe, ok bool) {
	if len(payload) != probeLength || string(payload[:len(probeMagic)]) != probeMagic {
		return probe{}, false
	}
	rest := payload[len(probeMagic):]
	return probe{
		batch:  binary.BigEndian.Uint32(rest),
		index:  binary.BigEndian.Uint32(rest[4:]),
		silent: rest[8] != 0,
	}, true
}
