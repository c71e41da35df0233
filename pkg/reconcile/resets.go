// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// resetConnections resets connections after syncs that left resets on record, until ctx ends. It has a
// goroutine of its own, as a walk through the conntrack table must not delay a repair.
func (l *Loop) resetConnections(ctx context.Context) {
	e := enforce.Enforcer{Dir: l.Node.Dir, Conntrack: l.Node.Conntrack}
	e.InForce = func(stored []policy.Source) (inForce, excluded []policy.Source) {
		file, _ := config.ReadPluginFile(l.Node.PluginFile) // each sync reports the error
		return file.InForce(stored)
	}
	due := time.NewTimer(0)
	due.Stop()
	for retry := time.Duration(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-l.resets:
		case <-due.C:
		}
		began := time.Now()
		deleted, next, err := e.ResetConnections(ctx)
		if len(deleted) > 0 {
			var count uint64
			var chains []string
			for chain, n := range deleted {
				count += n
				chains = append(chains, chain.Chain)
			}
			slices.Sort(chains)
			l.log.log.Info("reset connections", "count", count, "chain", strings.Join(slices.Compact(chains), ","),
				"duration", time.Since(began).Round(time.Microsecond))
		}
		interrupted := ctx.Err() != nil
		if l.ConnectionsReset != nil && (len(deleted) > 0 || err != nil && !interrupted) {
			l.ConnectionsReset(deleted, err)
		}
		switch {
		case interrupted:
			return
		case err != nil:
			l.log.once.Warn("failed to reset connections", "err", err)
			retry = min(max(2*retry, firstBackoff), longestBackoff)
			flowcontrol.Sleep(ctx, retry) // whatever a sync asks for meanwhile
			trigger(l.resets)
		default:
			retry = 0
			if next > 0 {
				due.Reset(next)
			}
		}
	}
}
