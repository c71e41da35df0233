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
	// The pause between attempts to bind an address doubles from firstRetry to longestRetry.
	firstRetry   = time.Second
	longestRetry = 30 * time.Second
	// shutdownTimeout is how long requests may take when ctx ends.
	shutdownTimeout = 3 * time.Second
)

// Serve serves h at a TCP address until ctx ends, and lets requests that are running finish. An address
// that cannot be bound is retried; the reason is logged once. With the address "" it does nothing.
func Serve(ctx context.Context, address string, h http.Handler, log *slog.Logger) {
	if address == "" {
		return
	}
	log = flowcontrol.LogOnce(log)
	retry(ctx, func() (bound bool) {
		var listening net.ListenConfig
		l, err := listening.Listen(ctx, "tcp", address)
		if bound = err == nil; bound {
			err = serve(ctx, l, h, log)
		}
		if err != nil && ctx.Err() == nil {
			log.Warn("failed to serve, trying again", "address", address,
				"err", fmt.Errorf("%w; free the address, or configure another", err))
		}
		return bound
	})
}

// retry calls try until ctx ends. A success resets the pause.
func retry(ctx context.Context, try func() bool) {
	for pause := firstRetry; ctx.Err() == nil; pause = min(2*pause, longestRetry) {
		if try() {
			pause = firstRetry
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// serve serves until ctx ends or the listener fails.
func serve(ctx context.Context, l net.Listener, h http.Handler, log *slog.Logger) error {
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
	shutdown := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		err := s.Shutdown(wait)
		if err != nil {
			err = s.Close()
		}
		shutdown <- err
	})
	err := s.Serve(l)
	if stop() { // the listener failed
		return errors.Join(err, s.Close())
	}
	return <-shutdown
}
