// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Patience is the time limit of an operation in a cluster on a slow machine.
const Patience = 45 * time.Second

// Await calls f at intervals until it returns nil or the time is over, and then returns the last
// error. It returns a final error at once.
func Await(ctx context.Context, within time.Duration, f func() error) error {
	began := time.Now()
	for pause := 20 * time.Millisecond; ; pause = min(pause*3/2, 500*time.Millisecond) {
		err := f()
		if err == nil {
			return nil
		}
		if errors.As(err, new(final)) {
			return err
		}
		if time.Since(began) > within {
			return fmt.Errorf("not within %s: %w", within, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w while waiting: %w", ctx.Err(), err)
		case <-time.After(pause):
		}
	}
}

// final is an error that waiting does not resolve.
type final struct{ error }

func (f final) Unwrap() error { return f.error }
