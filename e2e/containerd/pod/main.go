// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"
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
	case verb == "ask" && len(args) > 1:
		for _, to := range args[1:] {
			fmt.Println(to, ask(args[0], to))
		}
		select {}
	case verb == "load" && len(args) > 1:
		return load(args[0], args[1:])
	case verb == "serve" && len(args) == 1:
		return serve(":" + args[0])
	}
	return errors.New("usage: pod [ask PROTOCOL ADDR:PORT... | load INTERVAL ADDR:PORT... | serve PORT]")
}

const patience = 2 * time.Second

// ask sends one packet or opens one connection, and returns the answer.
func ask(protocol, to string) string {
	answer, err := send(protocol, to)
	if err != nil {
		return "- " + err.Error()
	}
	return strings.TrimSpace(answer)
}

func send(protocol, to string) (string, error) {
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
			answer := ask("udp", to[i%len(to)])
			line.Lock()
			defer line.Unlock()
			fmt.Println(at.UTC().Format(time.RFC3339Nano), to[i%len(to)], answer)
		}()
	}
}

// serve answers each packet and connection with the peer's address.
func serve(port string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	packets, err := net.ListenPacket("udp", port)
	if err != nil {
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
			go func() {
				defer func() { _ = conn.Close() }()
				lines := bufio.NewScanner(conn)
				for {
					if _, err := conn.Write(said(name, conn.RemoteAddr())); err != nil || !lines.Scan() {
						return // the peer closed the connection
					}
				}
			}()
		}
	}()
	buffer := make([]byte, 512)
	for {
		_, from, err := packets.ReadFrom(buffer)
		if err != nil {
			return err
		}
		if _, err := packets.WriteTo(said(name, from), from); err != nil {
			fmt.Fprintln(os.Stderr, "pod:", err)
		}
	}
}

// said returns the answer for a source; an IPv4-mapped address is printed as IPv4.
func said(name string, from net.Addr) []byte {
	var source netip.AddrPort
	switch a := from.(type) {
	case *net.UDPAddr:
		source = a.AddrPort()
	case *net.TCPAddr:
		source = a.AddrPort()
	}
	return fmt.Appendf(nil, "%s %s\n", name, netip.AddrPortFrom(source.Addr().Unmap(), source.Port()))
}
