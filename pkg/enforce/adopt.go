// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"errors"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// UnwritableError is why documents cannot be written. The rules may be right all
// the same.
type UnwritableError struct{ Err error }

func (e *UnwritableError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *UnwritableError) Unwrap() error { return e.Err }

// Adopt puts a proposal in force: its documents are written beside those in
// force, the rules are made to follow, and then the documents replace the old.
// If vouch finds that the rules will not do, the documents are discarded and
// what was written is undone: the last good state stays, in the kernel and on
// disk. The View is what stood after the attempt.
func (e *Enforcer) ApplyProposal(ctx context.Context, lock *store.Lock, s store.State, p *Proposal, vouch func(*State) error) (*State, error) {
	staged, err := stage(lock, p.Changed)
	if err != nil {
		return e.Observe(ctx, p.Sources, s.Record), &UnwritableError{err}
	}
	defer func() { e.warn(discard(staged)) }()
	was := e.Observe(ctx, p.Sources, s.Record)
	v := e.sync(ctx, was, p.Sources, p.Changed, s.Record, lock)
	if err := vouch(v); err != nil {
		if len(staged) > 0 && !lock.DryRun() {
			e.undo(ctx, was, s.Record, lock)
		}
		return v, err
	}
	e.warn(commit(staged)) // the rules are right; a document that lags is made up for the next time
	return v, nil
}

// undo brings the rules back to what the documents in force ask for, and what is
// no business of theirs to what stood there: one family may have been written,
// and the other not.
func (e *Enforcer) undo(ctx context.Context, was *State, before store.Record, lock *store.Lock) {
	state, err := e.Dir.Load()
	if err != nil {
		e.warn(err)
		return
	}
	now := e.Restore(ctx, was, before, state.Record, lock)
	e.Sync(ctx, state.Sources, now, lock)
}

func stage(lock *store.Lock, changed []policy.Source) (staged []*store.Staged, err error) {
	for _, c := range changed {
		one, err := lock.Stage(c)
		if err != nil {
			return nil, errors.Join(err, discard(staged))
		}
		staged = append(staged, one)
	}
	return staged, nil
}

func commit(staged []*store.Staged) error {
	var errs []error
	for _, s := range staged {
		errs = append(errs, s.Commit())
	}
	return errors.Join(errs...)
}

func discard(staged []*store.Staged) error {
	var errs []error
	for _, s := range staged {
		errs = append(errs, s.Discard())
	}
	return errors.Join(errs...)
}
