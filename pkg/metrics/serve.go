// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Serve serves h at the TCP address of a setting, "" for none, until ctx ends and running requests are
// finished. An address that cannot be bound is retried; the reason is logged once, and the Status has it
// until the address is bound.
func (m *Monitor) Serve(ctx context.Context, key, address string, h http.Handler, log *slog.Logger) {
	if address == "" {
		return
	}
	keepServing(ctx, key, address, h, log, func() (net.Listener, error) {
		var listening net.ListenConfig
		l, err := listening.Listen(ctx, "tcp", address)
		m.listens(key, err)
		if err != nil {
			const remedy = "free the address (ss -ltnp names the program that has it)"
			err = fmt.Errorf("%w; %s, or set %s to another", err, remedy, key)
		}
		return l, err
	})
	m.listens(key, nil)
}

func (m *Monitor) listens(key string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		delete(m.listenErrs, key)
	} else {
		m.listenErrs[key] = fmt.Sprintf("%s: %v", key, err)
	}
}

// ServeSocket serves the Status at the socket of the dataDir until ctx ends, as Serve does. The commands find
// it there without a flag, in a pod too; an address or a path of its own would be one more setting that both
// have to agree on. Only the holder of the instance lock binds it, with mode 0600, and it serves no secrets.
// A socket that cannot be bound is a warning: the rules do not depend on it.
func (m *Monitor) ServeSocket(ctx context.Context, d *store.Dir, log *slog.Logger) {
	keepServing(ctx, "socket", d.SocketPath(), m.Socket(), log, d.Listen)
}

func keepServing(
	ctx context.Context, key, address string, h http.Handler, log *slog.Logger,
	listen func() (net.Listener, error),
) {
	log = flowcontrol.LogOnce(log)
	for ctx.Err() == nil {
		l, err := listen()
		if err == nil {
			err = serve(ctx, l, h, log)
		}
		if err != nil && ctx.Err() == nil {
			log.Warn("failed to serve, trying again", "key", key, "address", address, "err", err)
		}
		flowcontrol.Sleep(ctx, time.Second)
	}
}

func serve(ctx context.Context, l net.Listener, h http.Handler, log *slog.Logger) (err error) {
	s := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute, // Prometheus scrapes at least each minute
		MaxHeaderBytes:    8 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ConnState:         newOpenConnections().changed,
		// No request waits longer than ctx.
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	failed := make(chan error, 1)
	go func() { failed <- s.Serve(l) }()
	select {
	case err = <-failed:
	case <-ctx.Done():
		const longest = 3 * time.Second // for requests that run now
		wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), longest)
		defer cancel()
		err = s.Shutdown(wait)
	}
	return errors.Join(err, s.Close())
}

const maxConnections = 64

// openConnections keeps at most maxConnections connections open. A new one takes the place of the oldest,
// whatever its client does: every user of the node can connect, and must neither exhaust the memory nor keep
// out a probe.
type openConnections struct {
	mu    sync.Mutex
	open  []net.Conn // oldest first
	ended *sync.Cond
}

func newOpenConnections() *openConnections {
	o := &openConnections{}
	o.ended = sync.NewCond(&o.mu)
	return o
}

// changed is for http.Server.ConnState.
func (o *openConnections) changed(c net.Conn, state http.ConnState) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch state {
	case http.StateNew: // the server accepts no other one before this returns
		o.open = append(o.open, c)
		for len(o.open) > maxConnections {
			_ = o.open[0].Close() // ends the context of its request, too
			o.ended.Wait()
		}
	case http.StateClosed:
		o.open = slices.DeleteFunc(o.open, func(other net.Conn) bool { return other == c })
		o.ended.Broadcast()
	}
}
