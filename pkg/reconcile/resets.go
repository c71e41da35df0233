// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
)

// resetConnections makes the resets on record that are due.
func (l *Loop) resetConnections(ctx context.Context) event {
	e := enforce.Enforcer{Dir: l.Node.Dir, Conntrack: l.Node.Conntrack}
	began := time.Now()
	deleted, next, err := e.ResetConnections(ctx)
	if ctx.Err() != nil {
		err = nil // it was interrupted
	}
	return connectionsReset{deleted, next, time.Since(began), err}
}

// connectionsReset reports a reset, and decides when the next one is due. A sync follows, as nothing is verified while
// resets are on record.
func (l *Loop) connectionsReset(e connectionsReset, now time.Time) {
	if len(e.deleted) > 0 {
		var count uint64
		var chains []string
		for chain, n := range e.deleted {
			count += n
			chains = append(chains, chain.Chain)
		}
		slices.Sort(chains)
		l.log.log.Info("reset connections", "count", count, "chain", strings.Join(slices.Compact(chains), ","),
			"duration", e.took.Round(time.Microsecond))
	}
	if l.ConnectionsReset != nil && (len(e.deleted) > 0 || e.err != nil) {
		l.ConnectionsReset(e.deleted, e.err)
	}
	s := &l.state
	s.triggers.rules = true
	switch {
	case e.err != nil:
		l.log.once.Warn("failed to reset connections", "err", e.err)
		s.resetRetry = min(max(2*s.resetRetry, firstRetry), lastRetry)
		s.resetDue = now.Add(s.resetRetry)
	case e.next > 0:
		s.resetRetry, s.resetDue = 0, now.Add(e.next)
	default:
		s.resetRetry = 0
	}
}
