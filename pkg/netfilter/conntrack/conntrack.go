// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// maxFiltered is the number of sources up to which the table is walked once for each of IPv4: to
	// skip an entry costs the kernel a tenth of what it costs to list it.
	maxFiltered = 4
	maxListed   = 100_000 // entries, up to which all of them are listed: that costs some 0.2 s of CPU
	maxReplies  = 20_000  // that are remembered, in 3 MB
)

// Reset deletes the stale conntrack entries in the network namespace of the calling thread and
// returns how many there were of each chain and family, also with an error, such as that of the
// context. It needs CAP_NET_ADMIN.
func Reset(
	ctx context.Context, judge *policy.ConnectionJudge,
) (deleted map[policy.ChainFamily]uint64, err error) {
	w := walk{judge: judge, deleted: map[policy.ChainFamily]uint64{}, routes: newRoutes()}
	families := judge.Families()
	translated, untranslated := judge.StaleKinds()
	mayBeStale := translated || untranslated
	if len(families) == 0 || !mayBeStale {
		return w.deleted, nil
	}
	err = w.all(ctx, families)
	if err == nil {
		err = w.deleteReversed(ctx)
	}
	err = errors.Join(err, w.list.Close(), w.remove.Close(), w.routes.socket.Close())
	if err != nil {
		err = fmt.Errorf("reset stale connections: %w", err)
	}
	return w.deleted, err
}

// walk is one Reset.
type walk struct {
	judge        *policy.ConnectionJudge
	list, remove nfnetlink.Conn // the kernel answers deletions beside a dump on another socket
	routes       *routes
	deleted      map[policy.ChainFamily]uint64
	replies      []nfnetlink.Tuple // of deleted entries without translation
}

// all walks the table.
func (w *walk) all(ctx context.Context, families []policy.Family) error {
	stats, err := w.list.ConntrackStats(ctx)
	if err != nil {
		return err
	}
	for _, filter := range w.filters(stats) {
		if len(families) == 1 && filter.Family == 0 {
			filter.Family = nfnetlink.FamilyOf(families[0].All().Addr())
		}
		err = w.list.Connections(ctx, filter, w.visit)
		if err != nil {
			return err
		}
	}
	return nil
}

// filters selects the entries that may be stale. In a large table the kernel leaves out what was source
// NATed, or what was not, if none of these can be stale: to list an entry costs it 3 µs, to skip one 0.3.
func (w *walk) filters(stats Stats) []nfnetlink.ConnectionFilter {
	sources := w.judge.Sources()
	if len(sources) > 0 && len(sources) <= maxFiltered {
		return filtersOf(sources)
	}
	const source, both = nfnetlink.SourceNAT, nfnetlink.SourceNAT | nfnetlink.DestinationNAT
	all := []nfnetlink.ConnectionFilter{{}}
	translated, untranslated := w.judge.StaleKinds()
	switch {
	case stats.Entries <= maxListed:
		return all
	case !translated:
		// Entries without the bit of a source NAT. One that changed the port alone sets the bit: the second
		// filter lists those of Services. What remains is a connection to no Service, in a large table, that
		// was given another port.
		return []nfnetlink.ConnectionFilter{{Mask: source}, {Status: both, Mask: both}}
	case !untranslated:
		return []nfnetlink.ConnectionFilter{{Status: source, Mask: source}}
	default:
		return all
	}
}

// filtersOf selects the entries of sources. The kernel does not filter those of IPv6 (ConnectionFilter.Src), so one
// walk lists all entries of that family.
func filtersOf(sources []netip.Addr) []nfnetlink.ConnectionFilter {
	var filters []nfnetlink.ConnectionFilter
	listsIPv6 := false
	for _, a := range sources {
		family := nfnetlink.FamilyOf(a)
		if family == nfnetlink.IPv4 {
			filters = append(filters, nfnetlink.ConnectionFilter{Family: family, Src: a})
			continue
		}
		if !listsIPv6 {
			filters = append(filters, nfnetlink.ConnectionFilter{Family: family})
		}
		listsIPv6 = true
	}
	return filters
}

func (w *walk) visit(e *nfnetlink.Connection) error {
	if e.Zone != 0 {
		return nil
	}
	c := policy.Connection{
		Src: e.Original.Src, Dst: e.Original.Dst, ReplySrc: e.Reply.Src, ReplyDst: e.Reply.Dst,
	}
	chain, stale := w.judge.Judge(&c, w.routes)
	if w.routes.err != nil || !stale {
		return w.routes.err
	}
	if c.Src == c.ReplyDst && len(w.replies) < maxReplies {
		w.replies = append(w.replies, e.Reply.Clone())
	}
	deleted, err := w.remove.DeleteConnection(e.Original, e.ID)
	if deleted {
		w.deleted[policy.ChainFamily{Chain: chain, Family: policy.FamilyOf(c.Src)}]++
	}
	return err
}

// deleteReversed deletes the entries that packets to pods, which were under way or are sent again,
// create after their connections were deleted. To conntrack these begin a connection to the pod,
// whose answers are not masqueraded. Linux sends data again after 0.2 s and a round trip
// (TCP_RTO_MIN).
func (w *walk) deleteReversed(ctx context.Context) error {
	const last = 320 * time.Millisecond // 0.63 s in all: masqueraded destinations may be far away
	for wait := 10 * time.Millisecond; len(w.replies) > 0 && wait <= last; wait *= 2 {
		select {
		case <-ctx.Done():
			return nil // the walk is complete
		case <-time.After(wait):
		}
		for _, tuple := range w.replies {
			if _, err := w.remove.DeleteConnection(tuple, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// Stats are the numbers of a network namespace's conntrack.
type Stats = nfnetlink.ConntrackStats

// ReadStats returns the numbers of the calling thread's network namespace. It needs CAP_NET_ADMIN.
func ReadStats(ctx context.Context) (Stats, error) {
	var c nfnetlink.Conn
	s, err := c.ConntrackStats(ctx)
	return s, errors.Join(err, c.Close())
}
