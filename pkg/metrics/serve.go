// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
)

const (
	bindRetry       = time.Second
	shutdownTimeout = 3 * time.Second // for requests that run when ctx ends
)

// Serve serves h at a TCP address until ctx ends, and lets requests that are running finish. An address
// that cannot be bound is retried; the reason is logged once. With the address "" it does nothing.
func Serve(ctx context.Context, address string, h http.Handler, log *slog.Logger) {
	log = flowcontrol.LogOnce(log)
	for address != "" && ctx.Err() == nil {
		if err := serve(ctx, address, h, log); err != nil && ctx.Err() == nil {
			log.Warn("failed to serve, trying again", "address", address,
				"err", fmt.Errorf("%w; free the address, or configure another", err))
		}
		select {
		case <-ctx.Done():
		case <-time.After(bindRetry):
		}
	}
}

// serve serves until ctx ends or the listener fails.
func serve(ctx context.Context, address string, h http.Handler, log *slog.Logger) error {
	var listening net.ListenConfig
	l, err := listening.Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
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
