// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"errors"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// lock takes the lock of the dataDir. The error is an UnwritableError, or an ErrBusy. It does not wait for
// a process that holds the lock while a program hangs: each ADD would wait for as long as that program may
// take.
func (n *node) lock(ctx context.Context) (*store.Lock, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go cancelIfHanging(ctx, cancel, n.Drivers)
	lock, err := n.Dir.Lock(ctx)
	if err != nil && !errors.Is(err, store.ErrBusy) {
		return nil, &enforce.UnwritableError{Err: err}
	}
	return lock, err
}

// cancelIfHanging cancels a context as soon as a program hangs for another process. An ADD that gets the lock
// at once does not ask.
func cancelIfHanging(ctx context.Context, cancel context.CancelCauseFunc, drivers netfilter.Drivers) {
	const interval = 100 * time.Millisecond
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if err := drivers.Hanging(); err != nil {
			cancel(err)
			return
		}
	}
}
