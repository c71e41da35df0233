// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

const (
	bindRetry       = time.Second
	shutdownTimeout = 3 * time.Second // for requests that run when ctx ends
)

// Serve serves h at the TCP address of a setting until ctx ends, and lets requests that are running finish.
// An address that cannot be bound is retried; the reason is logged once, and is a warning in the Status as
// long as it lasts. With the address "" it does nothing.
func (m *Monitor) Serve(ctx context.Context, key, address string, h http.Handler, log *slog.Logger) {
	if address == "" {
		return
	}
	e := endpoint{name: key, address: address, handler: h}
	e.listen = func() (net.Listener, error) {
		var listening net.ListenConfig
		return listening.Listen(ctx, "tcp", address)
	}
	e.explain = func(err error) error {
		if errors.Is(err, unix.EADDRINUSE) {
			return fmt.Errorf("%w by %s; free the address, or set %s to another", err, portHolder(address), key)
		}
		return fmt.Errorf("%w; set %s to another address", err, key)
	}
	m.serve(ctx, e, log)
}

// ServeSocket serves the Status at the socket of the dataDir until ctx ends, as Serve does.
func (m *Monitor) ServeSocket(ctx context.Context, d *store.Dir, log *slog.Logger) {
	m.serve(ctx, endpoint{
		name: "socket", address: d.SocketPath(), handler: m.Socket(), listen: d.Listen, explain: func(err error) error { return err },
	}, log)
}

// endpoint is where a handler is served.
type endpoint struct {
	name, address string
	handler       http.Handler
	listen        func() (net.Listener, error)
	explain       func(error) error // adds cause and remedy to an error of listen
}

func (m *Monitor) serve(ctx context.Context, e endpoint, log *slog.Logger) {
	log = flowcontrol.LogOnce(log)
	defer m.served(e.name, nil)
	for last := ""; ctx.Err() == nil; {
		l, err := e.listen()
		if err == nil {
			m.served(e.name, nil)
			last = ""
			err = serve(ctx, l, e.handler, log)
		}
		if err != nil && ctx.Err() == nil && err.Error() != last {
			last = err.Error()
			err = e.explain(err)
			m.served(e.name, err)
			log.Warn("failed to serve, trying again", "key", e.name, "address", e.address, "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(bindRetry):
		}
	}
}

// serve serves until ctx ends or the listener fails.
func serve(ctx context.Context, l net.Listener, h http.Handler, log *slog.Logger) (err error) {
	s := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute, // Prometheus scrapes at least each minute
		MaxHeaderBytes:    8 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		BaseContext:       func(net.Listener) context.Context { return ctx }, // no request waits longer than ctx
	}
	failed := make(chan error, 1)
	go func() { failed <- s.Serve(l) }()
	select {
	case err = <-failed:
	case <-ctx.Done():
		wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		err = s.Shutdown(wait)
	}
	return errors.Join(err, s.Close())
}

// portHolder names the process that listens on a TCP address, as far as /proc shows it.
func portHolder(address string) string {
	const unknown = "another process"
	wanted, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		return unknown
	}
	sockets := listeningSockets(wanted.AddrPort())
	if len(sockets) == 0 {
		return unknown
	}
	files, _ := filepath.Glob("/proc/[0-9]*/fd/*") // the pattern is valid
	for _, file := range files {
		if target, err := os.Readlink(file); err != nil || !slices.Contains(sockets, target) {
			continue
		}
		pid := strings.Split(file, "/")[2]
		name, _ := os.ReadFile("/proc/" + pid + "/comm") // "" if it ended meanwhile
		return fmt.Sprintf("%s (pid %s)", policy.Quote(strings.TrimSpace(string(name))), pid)
	}
	return unknown
}

// listeningSockets returns the sockets of this network namespace that listen on an address, as the links in
// /proc/PID/fd name them.
func listeningSockets(wanted netip.AddrPort) (sockets []string) {
	const listens = "0A"                            // TCP_LISTEN
	const local, state, inode, fields = 1, 3, 9, 10 // as proc(5) has them
	for _, table := range []string{"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"} {
		file, err := os.Open(table)
		if err != nil {
			continue
		}
		for lines := bufio.NewScanner(file); lines.Scan(); {
			f := strings.Fields(lines.Text())
			if len(f) < fields || f[state] != listens {
				continue
			}
			address, port, _ := strings.Cut(f[local], ":")
			bound := addressOf(address)
			n, err := strconv.ParseUint(port, 16, 16)
			anyAddress := bound.IsUnspecified() || !wanted.Addr().IsValid() || wanted.Addr().IsUnspecified()
			if err == nil && uint16(n) == wanted.Port() && (anyAddress || bound == wanted.Addr().Unmap()) {
				sockets = append(sockets, "socket:["+f[inode]+"]")
			}
		}
		_ = file.Close() // it was only read
	}
	return sockets
}

// addressOf decodes an address of /proc/net/tcp: words of 32 bits in the byte order of the CPU.
func addressOf(text string) netip.Addr {
	b, err := hex.DecodeString(text)
	if err != nil || len(b)%4 != 0 {
		return netip.Addr{}
	}
	for word := range slices.Chunk(b, 4) {
		binary.NativeEndian.PutUint32(word, binary.BigEndian.Uint32(word))
	}
	a, _ := netip.AddrFromSlice(b)
	return a.Unmap()
}
