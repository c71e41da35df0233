// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"bytes"
	"context"
	"log/slog"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// reconciler is what a process of a running reconciler has besides others.
type reconciler struct {
	loop    *reconcile.Loop
	stop    context.CancelFunc
	report  *reconcile.Report      // the last one
	watched []netfilter.OwnedChain // nil: all
	log     bytes.Buffer
}

// run starts a reconciler that stays.
func (w *world) run(o *op) *process {
	if n := len(w.reconcilers()); n > 1 || n == 1 && o.number > 1 { // the second one is on standby
		return nil
	}
	ctx, stop := context.WithCancel(context.Background())
	node := w.node()
	r := &reconciler{stop: stop}
	r.loop = reconcile.NewLoop(node, slog.New(slog.NewTextHandler(&r.log, nil)), func(report *reconcile.Report) { r.report = report })
	r.loop.Verified = node.Publish
	if w.managed() != nil {
		w.manage(node, r)
	}
	r.loop.Watch = func(chains []netfilter.OwnedChain) { r.watched = chains }
	p := w.start(o, func(*process) error {
		r.loop.Run(ctx)
		return nil
	}, func(p *process) {
		if stop(); p.returned && ctx.Err() == nil {
			w.object("%s ends by itself", p.Name)
		}
	})
	p.reconciler = r
	// The notifications begin before the loop reads anything.
	r.loop.Committed(reconcile.Commit{Generation: w.kernel.Generation.Number, Touched: true})
	w.mayRead(p)
	return p
}

// reconcilers returns those that run.
func (w *world) reconcilers() (all []*process) {
	for _, p := range w.running {
		if p.reconciler != nil && !p.ended() && !p.Dead {
			all = append(all, p)
		}
	}
	return all
}

// active returns the reconciler that is not on standby, nil if there is none or it has not reported yet.
func (w *world) active() *process {
	all := slices.DeleteFunc(w.reconcilers(), func(p *process) bool {
		return p.report == nil || slices.ContainsFunc(p.report.Problems, func(x reconcile.Problem) bool { return x.Reason == reconcile.ReasonStandby })
	})
	if len(all) != 1 {
		return nil
	}
	return all[0]
}

// tell tells the reconcilers something, a little later.
func (w *world) tell(what func(*process)) {
	for _, p := range w.reconcilers() {
		w.notices = append(w.notices, func() {
			if !p.Dead {
				what(p)
			}
		})
	}
}

// committed tells the reconcilers of a commit. The chains are those that it touched; "" is an owned table.
func (w *world) committed(chains []string) {
	generation, by, writer := w.kernel.Generation.Number, reconcile.Writer{Process: reconcile.Process{PID: 1, Program: "other"}}, w.last
	if w.disturbing {
		writer = nil
	}
	w.tell(func(p *process) {
		touched := slices.ContainsFunc(chains, func(chain string) bool {
			return chain == "" || p.watched == nil || slices.ContainsFunc(p.watched, func(o netfilter.OwnedChain) bool { return o.Chain == chain })
		})
		c := reconcile.Commit{Generation: generation, Touched: touched, By: by}
		if p == writer {
			c.By = reconcile.Writer{}
		}
		p.loop.Committed(c)
	})
}

// filesChanged tells the reconcilers that a file of the configuration changed.
func (w *world) filesChanged() { w.tell(func(p *process) { p.loop.FilesChanged() }) }

// mayRead takes note that processes may store what the files state, and drop what none states.
func (w *world) mayRead(processes ...*process) {
	for _, n := range w.networks {
		for _, p := range processes {
			if n.conf != nil || n.used.IsZero() {
				n.claim(n.conf, p)
			}
		}
	}
}
