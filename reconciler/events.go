// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/fswatch"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// deaf is how long to wait before events are asked for again.
const deaf = 10 * time.Second

// listen tells the loop of changes of rules, until ctx ends. Without events the
// interval has to do.
func listen(ctx context.Context, loop *reconcile.Loop, warn func(error)) {
	told := false
	for ctx.Err() == nil {
		err := hear(ctx, loop)
		if ctx.Err() != nil {
			return
		}
		if !told {
			warn(fmt.Errorf("no change events of nf_tables, the interval has to do: %w", err))
			told = true
		}
		select {
		case <-ctx.Done():
		case <-time.After(deaf):
		}
	}
}

func hear(ctx context.Context, loop *reconcile.Loop) error {
	l, err := nfnetlink.Listen()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer func() {
		if stop() {
			_ = l.Close()
		}
	}()
	loop.RulesChanged(reconcile.Writer{}) // what happened before anybody listened
	self := ownProgram()
	for {
		commits, err := l.Next()
		if err != nil && !errors.Is(err, nfnetlink.ErrLost) {
			return err
		}
		var by reconcile.Writer
		for _, c := range commits {
			if c.Program != self {
				by = reconcile.Writer{PID: c.PID, Program: c.Program}
			}
		}
		loop.RulesChanged(by)
	}
}

// ownProgram is what the kernel calls us in its events. (Its pid there is that of
// a thread, and not the one that a container knows.)
func ownProgram() string {
	name, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(name))
}

// watch tells the loop of changes in the directories of the watcher, until ctx
// ends. The watcher has to be there before the loop reads for the first time.
func watch(ctx context.Context, loop *reconcile.Loop, warn func(error), w *fswatch.Watcher) {
	defer func() { _ = w.Close() }()
	for deaf := ""; ; {
		// A watch that cannot be had is tried again, and Changed delivers then too.
		if err := w.Err(); err != nil && err.Error() != deaf {
			deaf = err.Error()
			warn(fmt.Errorf("not all files have events, the interval has to do: %w", err))
		}
		select {
		case <-ctx.Done():
			return
		case <-w.Changed():
			loop.FilesChanged()
		}
	}
}
