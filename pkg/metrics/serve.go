// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// The pause between tries to bind an address doubles from firstTry to
	// lastTry for as long as it cannot be bound.
	firstTry = time.Second
	lastTry  = 30 * time.Second
	// farewell is how long answers under way may take when ctx ends.
	farewell = 3 * time.Second
)

// Serve serves h at a TCP address until ctx ends; answers under way then have a
// moment to be finished. An address that cannot be bound, or is lost, is tried
// again and again; warn is told why, once for each reason. The address "" is off.
func Serve(ctx context.Context, address string, h http.Handler, warn func(error)) {
	if address == "" {
		return
	}
	t := newTeller(warn)
	persist(ctx, func() bool {
		var listening net.ListenConfig
		l, err := listening.Listen(ctx, "tcp", address)
		bound := err == nil
		if bound {
			err = serve(ctx, l, h, t)
		}
		if err != nil && ctx.Err() == nil {
			t.tell(fmt.Errorf("serve on %s: %w; it is tried again until it works: free the address, or configure another",
				policy.Quote(address), err))
		}
		return bound
	})
}

// persist tries until ctx ends. After a try that got somewhere the pauses begin
// anew.
func persist(ctx context.Context, try func() (got bool)) {
	pause := firstTry
	for ctx.Err() == nil {
		if try() {
			pause = firstTry
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, lastTry)
	}
}

// serve serves until ctx ends or the listener fails.
func serve(ctx context.Context, l net.Listener, h http.Handler, t *teller) error {
	s := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute, // a scraper comes back each minute or sooner
		MaxHeaderBytes:    8 << 10,
		ErrorLog:          log.New(t, "", 0),
		// What waits on behalf of a request does not wait for longer than ctx.
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	over := make(chan struct{})
	stopped := context.AfterFunc(ctx, func() {
		defer close(over)
		enough, cancel := context.WithTimeout(context.WithoutCancel(ctx), farewell)
		defer cancel()
		if s.Shutdown(enough) != nil {
			t.close(s.Close)
		}
	})
	err := s.Serve(l)
	if stopped() {
		t.close(s.Close) // the listener failed; ctx goes on
		return err
	}
	<-over
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
