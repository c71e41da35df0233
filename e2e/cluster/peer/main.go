// SPDX-License-Identifier: Apache-2.0

// Command peer is the program of test pods.
//
//	peer pause               waits until it is terminated
//	peer serve PORT NAME     answers "NAME ADDRESS:PORT" to each sender, UDP and TCP
//	peer ask FLOW...         sends to each and prints "FLOW NAME ADDRESS:PORT": what the receiver saw
//	peer stream FLOW...      sends to each in turn, from a new port each time, until it is terminated
//
// A FLOW is udp:ADDRESS:PORT or tcp:ADDRESS:PORT.
package main

import (
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
)

// within is the timeout for an answer. A UDP packet without an answer is sent again once.
const within = time.Second

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "peer: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("no command")
	}
	// The first process of a container ignores signals without a handler.
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	switch verb := args[0]; verb {
	case "pause":
	case "serve":
		if err := serve(args[1], args[2]); err != nil {
			return err
		}
	case "ask":
		for _, flow := range args[1:] {
			answer, err := ask(flow)
			if err != nil {
				answer = fmt.Sprintf("- %v", err)
			}
			fmt.Printf("%s %s\n", flow, answer)
		}
		return nil
	case "stream":
		go stream(args[1:])
	default:
		return fmt.Errorf("%q is none of pause, serve, ask, stream", verb)
	}
	<-ended
	return nil
}

// serve answers in the background.
func serve(port, name string) error {
	conn, err := net.ListenPacket("udp4", ":"+port)
	if err != nil {
		return err
	}
	// The answer is sent from the address that received the packet; a node has several.
	packets := ipv4.NewPacketConn(conn)
	if err := packets.SetControlMessage(ipv4.FlagDst, true); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", ":"+port)
	if err != nil {
		return err
	}
	go func() {
		buffer := make([]byte, 512)
		for {
			_, asked, from, err := packets.ReadFrom(buffer)
			if err == nil {
				answer := fmt.Appendf(nil, "%s %s\n", name, from)
				_, err = packets.WriteTo(answer, &ipv4.ControlMessage{Src: asked.Dst}, from)
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}
	}()
	go func() {
		for {
			conn, err := listener.Accept()
			if err == nil {
				_, err = fmt.Fprintf(conn, "%s %s\n", name, conn.RemoteAddr())
				_ = conn.Close()
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}
	}()
	return nil
}

// ask returns the answer.
func ask(flow string) (string, error) {
	network, address, _ := strings.Cut(flow, ":")
	answer, err := askOnce(network, address)
	if err != nil && network == "udp" {
		answer, err = askOnce(network, address)
	}
	return answer, err
}

func askOnce(network, address string) (string, error) {
	conn, err := net.DialTimeout(network, address, within)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(within)); err != nil {
		return "", err
	}
	if network == "udp" {
		if _, err := conn.Write([]byte("?")); err != nil {
			return "", err
		}
	}
	buffer := make([]byte, 512)
	n, err := conn.Read(buffer)
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(buffer[:n])), nil
}

// stream sends packets with the sender's address and the destination. It starts at once and ignores
// errors, because the network may not exist yet or any more.
func stream(flows []string) {
	for {
		for _, flow := range flows {
			network, address, _ := strings.Cut(flow, ":")
			conn, err := net.Dial(network, address)
			if err == nil {
				self := conn.LocalAddr().(*net.UDPAddr).IP
				_, _ = fmt.Fprintf(conn, "%s %s", self, address)
				_ = conn.Close()
			}
			time.Sleep(2 * time.Millisecond)
		}
	}
}
