// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
)

func main() {
	fmt.Fprintln(os.Stderr, "pod:", run(os.Args[1:]))
	os.Exit(1)
}

// run returns only on an error or at the end of the command.
func run(args []string) error {
	// Process 1 of a container ignores signals without a handler.
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-end
		os.Exit(0)
	}()
	if len(args) == 0 {
		select {}
	}
	verb, args := args[0], args[1:]
	switch {
	case (verb == "ask" || verb == "first") && len(args) > 0:
		for _, flow := range args {
			fmt.Println(flow, ask(flow))
		}
		if verb == "first" {
			select {}
		}
		os.Exit(0)
	case verb == "load" && len(args) > 1:
		return load(args[0], args[1:])
	case verb == "stream" && len(args) > 0:
		stream(args)
	case verb == "serve" && len(args) == 2:
		return serve(":"+args[0], args[1])
	}
	return errors.New("usage: pod [serve PORT NAME | ask FLOW... | first FLOW... | load INTERVAL FLOW... | stream FLOW...]")
}

const patience = 2 * time.Second

// ask sends one packet or opens one connection, and returns the answer.
func ask(flow string) string {
	answer, err := send(flow)
	if err != nil {
		return "- " + err.Error()
	}
	return strings.TrimSpace(answer)
}

func send(flow string) (string, error) {
	protocol, to, _ := strings.Cut(flow, ":")
	conn, err := net.DialTimeout(protocol, to, patience)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if protocol != "tcp" {
		// With TCP the server sends first.
		if _, err := conn.Write([]byte("?\n")); err != nil {
			return "", err
		}
	}
	return bufio.NewReader(conn).ReadString('\n')
}

func load(interval string, to []string) error {
	pause, err := time.ParseDuration(interval)
	if err != nil {
		return err
	}
	tick := time.NewTicker(pause)
	var line sync.Mutex
	for i := 0; ; i++ {
		at := <-tick.C
		go func() {
			answer := ask(to[i%len(to)])
			line.Lock()
			defer line.Unlock()
			fmt.Println(at.UTC().Format(time.RFC3339Nano), to[i%len(to)], answer)
		}()
	}
}

// stream starts at once and ignores errors, because the network may not exist yet or any more.
func stream(flows []string) {
	for {
		for _, flow := range flows {
			protocol, to, _ := strings.Cut(flow, ":")
			conn, err := net.Dial(protocol, to)
			if err == nil {
				_, _ = fmt.Fprintf(conn, "%s %s", conn.LocalAddr().(*net.UDPAddr).IP, to)
				_ = conn.Close()
			}
			time.Sleep(2 * time.Millisecond)
		}
	}
}

// serve answers each packet and connection with the peer's address.
func serve(port, name string) error {
	conn, err := net.ListenPacket("udp4", port)
	if err != nil {
		return err
	}
	// The answer is sent from the address that received the packet; a node has several.
	packets := ipv4.NewPacketConn(conn)
	if err := packets.SetControlMessage(ipv4.FlagDst, true); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", port)
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // the socket is closed only by the end of the process
			}
			_, _ = fmt.Fprintf(conn, "%s %s\n", name, conn.RemoteAddr()) // the peer notices
			_ = conn.Close()
		}
	}()
	buffer := make([]byte, 512)
	for {
		_, asked, from, err := packets.ReadFrom(buffer)
		if err != nil {
			return err
		}
		if _, err := packets.WriteTo(fmt.Appendf(nil, "%s %s\n", name, from), &ipv4.ControlMessage{Src: asked.Dst}, from); err != nil {
			fmt.Fprintln(os.Stderr, "pod:", err)
		}
	}
}
