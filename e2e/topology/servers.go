// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// unmap returns the address as in the packet, without the receiver's zone.
func unmap(a net.Addr) netip.AddrPort {
	var source netip.AddrPort
	switch a := a.(type) {
	case *net.UDPAddr:
		source = a.AddrPort()
	case *net.TCPAddr:
		source = a.AddrPort()
	}
	return netip.AddrPortFrom(source.Addr().Unmap().WithZone(""), source.Port())
}

// udpServer answers each packet from the address that it was sent to.
type udpServer struct {
	observer *observer
	host     *Host
	conn     *net.UDPConn
	// reader yields packets with their destination address in a control message; answerFrom
	// converts that message into one that sends from this address.
	reader     batchReader
	answerFrom func(received []byte) ([]byte, error)
}

// batchReader is the common interface of ipv4.PacketConn and ipv6.PacketConn.
type batchReader interface {
	ReadBatch(messages []ipv4.Message, flags int) (int, error)
}

func newUDPServer(o *observer, h *Host, conn *net.UDPConn) (*udpServer, error) {
	s := &udpServer{observer: o, host: h, conn: conn}
	if conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Is4() {
		packets := ipv4.NewPacketConn(conn)
		s.reader = packets
		s.answerFrom = func(received []byte) ([]byte, error) {
			var control ipv4.ControlMessage
			err := control.Parse(received)
			return (&ipv4.ControlMessage{Src: control.Dst}).Marshal(), err
		}
		return s, packets.SetControlMessage(ipv4.FlagDst, true)
	}
	packets := ipv6.NewPacketConn(conn)
	s.reader = packets
	s.answerFrom = func(received []byte) ([]byte, error) {
		var control ipv6.ControlMessage
		err := control.Parse(received)
		return (&ipv6.ControlMessage{Src: control.Dst}).Marshal(), err
	}
	return s, packets.SetControlMessage(ipv6.FlagDst, true)
}

func (s *udpServer) run() {
	defer s.observer.done(s.conn)
	messages := make([]ipv4.Message, 64)
	for i := range messages {
		messages[i].Buffers = [][]byte{make([]byte, 512)}
		messages[i].OOB = make([]byte, 128)
	}
	for {
		n, err := s.reader.ReadBatch(messages, 0)
		if err != nil {
			return // closed; an unconnected socket has no other error
		}
		for _, m := range messages[:n] {
			s.handle(m.Buffers[0][:m.N], m)
		}
	}
}

func (s *udpServer) handle(payload []byte, m ipv4.Message) {
	seen := Seen{By: s.host.Name, Source: unmap(m.Addr)}
	p, isProbe := parseProbe(payload)
	var unanswered error
	if !p.silent {
		control, err := s.answerFrom(m.OOB[:m.NN])
		if err == nil {
			_, _, err = s.conn.WriteMsgUDP(answer(s.host, seen.Source), control, m.Addr.(*net.UDPAddr))
		}
		unanswered = err
	}
	if isProbe {
		s.observer.deliver(p, seen, unanswered)
	}
}

// tcpServer writes the peer's address to each new connection, and again for each line.
type tcpServer struct {
	observer *observer
	host     *Host
	listener net.Listener
}

func (s tcpServer) run() {
	defer s.observer.done(s.listener)
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			return // closed
		}
		if err := s.observer.start(conn, func() { s.converse(conn) }); err != nil {
			return // closed
		}
	}
}

func (s tcpServer) converse(conn net.Conn) {
	defer s.observer.done(conn)
	text := answer(s.host, unmap(conn.RemoteAddr()))
	lines := bufio.NewScanner(conn)
	for {
		if _, err := conn.Write(text); err != nil || !lines.Scan() {
			return // the peer closed the connection
		}
	}
}

// observer runs the servers of a topology's hosts and passes the probes that they receive to the
// senders.
type observer struct {
	mu    sync.RWMutex
	batch uint32
	sinks map[uint32]sink
	// window is the number of probes that may be in flight, so that the smallest receive buffer
	// holds them.
	window int64

	closing sync.Mutex
	open    map[io.Closer]bool
	closed  bool
	running sync.WaitGroup
}

// sink receives what a host saw of a probe. unanswered is the reason for which no answer was sent
// to a probe that asked for one. Several goroutines call it; it must return quickly.
type sink func(index uint32, seen Seen, unanswered error)

func newObserver() *observer {
	return &observer{sinks: map[uint32]sink{}, window: maxWindow, open: map[io.Closer]bool{}}
}

// expect registers a sink for a batch of probes until forget is called. The sink is not called
// after forget returns.
func (o *observer) expect(s sink) (batch uint32, forget func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.batch++
	batch = o.batch
	o.sinks[batch] = s
	return batch, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.sinks, batch)
	}
}

// deliver calls the sink with the lock held, so that forget waits for it.
func (o *observer) deliver(p probe, seen Seen, unanswered error) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if s, ok := o.sinks[p.batch]; ok {
		s(p.index, seen, unanswered)
	}
}

// serve makes a host answer at a UDP and TCP port in both families.
func (o *observer) serve(h *Host, port uint16) error {
	config := net.ListenConfig{Control: o.prepare}
	err := h.Do(func() error {
		for _, family := range []string{"4", "6"} {
			address := fmt.Sprintf(":%d", port)
			packets, err := config.ListenPacket(context.Background(), "udp"+family, address)
			if err != nil {
				return err
			}
			server, err := newUDPServer(o, h, packets.(*net.UDPConn))
			if err != nil {
				return errors.Join(err, packets.Close())
			}
			if err := o.start(packets, server.run); err != nil {
				return err
			}
			listener, err := config.Listen(context.Background(), "tcp"+family, address)
			if err != nil {
				return err
			}
			if err := o.start(listener, tcpServer{o, h, listener}.run); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("serve port %d on %s: %w", port, h.Name, err)
	}
	return nil
}

// prepare lets a socket answer from addresses that the host does not have, and enlarges its buffer.
func (o *observer) prepare(network, _ string, socket syscall.RawConn) error {
	level, option := unix.SOL_IP, unix.IP_TRANSPARENT
	if network[len(network)-1] == '6' {
		level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	var set error
	err := socket.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), level, option, 1)
		if set == nil && network[:3] == "udp" {
			set = o.enlarge(int(fd))
		}
	})
	if err := errors.Join(set, err); err != nil {
		return fmt.Errorf("set socket options: %w", err)
	}
	return nil
}

const (
	receiveBuffer = 8 << 20 // bytes
	// perProbe is an upper bound for the receive buffer of one probe.
	perProbe  = 2 << 10 // bytes
	maxWindow = 2048    // probes
)

// enlarge requests a large receive buffer. In a user namespace net.core.rmem_max limits it, usually
// to 208 KiB, and the window shrinks accordingly.
func (o *observer) enlarge(fd int) error {
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
	if errors.Is(err, unix.EPERM) {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
	}
	if err != nil {
		return err
	}
	granted, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.window = min(o.window, int64(granted/perProbe))
	return nil
}

// newSendWindow returns the window of one flood of probes.
func (o *observer) newSendWindow() sendWindow {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return sendWindow{window: o.window}
}

// start runs a server until c is closed.
func (o *observer) start(c io.Closer, run func()) error {
	o.closing.Lock()
	defer o.closing.Unlock()
	if o.closed {
		return errors.Join(net.ErrClosed, c.Close())
	}
	o.open[c] = true
	o.running.Go(run)
	return nil
}

// done removes a connection that ended by itself.
func (o *observer) done(c io.Closer) {
	o.closing.Lock()
	defer o.closing.Unlock()
	if o.open[c] {
		delete(o.open, c)
		_ = c.Close() // no reader waits for unsent data
	}
}

func (o *observer) close() error {
	o.closing.Lock()
	o.closed = true
	var errs []error
	for c := range o.open {
		errs = append(errs, c.Close())
	}
	clear(o.open)
	o.closing.Unlock()
	o.running.Wait()
	return errors.Join(errs...)
}
