// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
)

// Check finds out whether the rules are what the sources ask for, and writes
// nothing. A difference is looked at once more when nobody is about to remove it.
func (n *Node) Check(ctx context.Context) *Report {
	r := n.DryRun(ctx, n.Read())
	if !r.Differs() {
		return r
	}
	wait, cancel := context.WithTimeout(ctx, n.LockWait)
	defer cancel()
	lock, err := n.Dir.LockToRead(wait)
	if err != nil {
		r.warn(err)
		return r
	}
	again := n.DryRun(ctx, n.Read())
	again.warn(lock.Release())
	return again
}

// Differs reports whether rules in the kernel are not what the sources ask for.
func (r *Report) Differs() bool {
	return r.Rules != nil && r.Refused == nil && r.Rules.Differs()
}

// Incomplete returns why nobody here knows what the rules should be, or nil: a newer
// version wrote some of the documents, or they are damaged and no source says what
// they held.
func (r *Report) Incomplete() error {
	return errors.Join(append(slices.Clip(r.Lost), newer(r.State))...)
}

// Obstacles are the problems but for differences that a pass would remove.
func (r *Report) Obstacles() []Problem {
	var left []Problem
	for _, p := range r.Problems {
		var drift *enforce.DriftError
		if !errors.As(p.Err, &drift) {
			left = append(left, p)
		}
	}
	return left
}
