// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Reset deletes the stale conntrack entries in the network namespace of the calling thread and returns
// how many there were of each chain and family, also with an error. It walks the table once and ends
// with the context's error between two reads if the context is done. It needs CAP_NET_ADMIN over the
// namespace.
func Reset(ctx context.Context, judge *policy.ConnectionJudge) (deleted map[policy.ChainFamily]uint64, err error) {
	deleted = map[policy.ChainFamily]uint64{}
	families := judge.Families()
	if len(families) == 0 {
		return deleted, nil
	}
	if err := reset(ctx, judge, familyOf(families), deleted); err != nil {
		return deleted, fmt.Errorf("reset stale connections: %w", err)
	}
	return deleted, nil
}

func familyOf(families []policy.Family) nfnetlink.Family {
	switch {
	case len(families) > 1:
		return nfnetlink.Inet
	case families[0] == policy.IPv4:
		return nfnetlink.IPv4
	}
	return nfnetlink.IPv6
}

func reset(
	ctx context.Context, judge *policy.ConnectionJudge, family nfnetlink.Family, deleted map[policy.ChainFamily]uint64,
) (err error) {
	// The kernel answers deletions beside a dump on another socket.
	list, err := nfnetlink.Dial()
	if err != nil {
		return err
	}
	defer closeInto(list, &err)
	remove, err := nfnetlink.Dial()
	if err != nil {
		return err
	}
	defer closeInto(remove, &err)
	routes := newRoutes()
	defer closeInto(routes, &err)

	var batch nfnetlink.Deletions
	var chains []policy.ChainFamily // of the batch
	flush := func() error {
		for _, chain := range chains {
			deleted[chain]++
		}
		err := remove.DeleteConnections(&batch, func(i int) { deleted[chains[i]]-- })
		chains = chains[:0]
		return err
	}
	err = list.Connections(ctx, family, func(e *nfnetlink.Connection) error {
		if e.Zone {
			return nil
		}
		c := policy.Connection{Src: e.Src, Dst: e.Dst, ReplySrc: e.ReplySrc, ReplyDst: e.ReplyDst}
		chain, stale := judge.Judge(&c, routes)
		if routes.err != nil || !stale {
			return routes.err
		}
		batch.Add(e)
		chains = append(chains, policy.ChainFamily{Chain: chain, Family: policy.FamilyOf(e.Src)})
		if batch.Full() {
			return flush()
		}
		return nil
	})
	return errors.Join(err, flush())
}

func closeInto(c interface{ Close() error }, err *error) { *err = errors.Join(*err, c.Close()) }

// Stats are the numbers of a network namespace's conntrack.
type Stats = nfnetlink.ConntrackStats

// ReadStats returns the numbers of the network namespace of the calling thread. It needs CAP_NET_ADMIN
// over the namespace.
func ReadStats(ctx context.Context) (s Stats, err error) {
	c, err := nfnetlink.Dial()
	if err != nil {
		return s, err
	}
	defer closeInto(c, &err)
	return c.ConntrackStats(ctx)
}
