// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"bufio"
	"net"
	"net/netip"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
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
