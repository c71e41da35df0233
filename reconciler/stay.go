// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
)

// stay uninstalls until it is done, and then waits until it is stopped, and does
// the same with what comes back meanwhile: a DaemonSet has no other way to run
// something once on each node. It is ready when nothing is left to do.
func (a *app) stay(ctx context.Context, d *departure) error {
	log := a.logger(d.node.Settings)
	p := &progress{left: "not begun yet"}
	var serving sync.WaitGroup
	defer serving.Wait()
	serving.Go(func() {
		metrics.Serve(ctx, d.node.Settings.HealthListen, p.pages(), log)
	})
	told := 0
	for done := false; ctx.Err() == nil; sleep(ctx, pause) {
		if done && !d.places.HaveAny() {
			continue
		}
		err := d.step(ctx)
		if ctx.Err() != nil {
			break
		}
		for _, w := range d.notes[told:] {
			log.Warn(w)
		}
		told = len(d.notes)
		if p.now(text(err)) && err != nil {
			log.Warn("not done yet, trying again", "reason", err.Error())
		}
		if done = err == nil; done {
			log.Info("uninstalled; this process may be stopped", "conflists", len(d.Conflists), "plugin", strings.Join(d.Plugins, ", "), "chains", len(d.Removed))
		}
	}
	return nil
}

// progress is what is left to do, "" when nothing is.
type progress struct {
	mu   sync.Mutex
	left string
}

// now takes note, and reports whether it is news.
func (p *progress) now(left string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	news := left != p.left
	p.left = left
	return news
}

func (p *progress) pages() http.Handler {
	alive := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") }
	m := http.NewServeMux()
	m.HandleFunc("GET /livez", alive)
	m.HandleFunc("GET /healthz", alive)
	m.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		p.mu.Lock()
		left := p.left
		p.mu.Unlock()
		if left != "" {
			http.Error(w, "uninstall: "+left, http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return m
}
