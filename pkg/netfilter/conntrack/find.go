// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// Query selects connections by what their peers see.
type Query struct {
	Source   netip.AddrPort // that packets leave with
	Protocol uint8          // IPPROTO_*, 0 is each that has ports
	To       netip.Addr     // the destination, or the endpoint that a Service chose; the zero Addr is any
}

// Found is a connection that a Query selects.
type Found struct {
	Original, Reply nfnetlink.Flow
	Zone            uint16
	SourceLocal     bool   // the source is an address of the node
	EndpointLocal   bool   // the endpoint is an address of the node
	Interface       string // by which packets leave, "" if it is not known
}

// Find returns the connections of every zone in the network namespace of the calling thread that
// leave with a source address and port. It needs CAP_NET_ADMIN.
func Find(ctx context.Context, q Query) ([]Found, error) {
	var c nfnetlink.Conn
	r := newRoutes()
	found, err := q.find(ctx, &c)
	for i := range found {
		found[i].addRoutes(r)
	}
	if err := errors.Join(err, r.err, c.Close(), r.socket.Close()); err != nil {
		return nil, fmt.Errorf("find connections: %w", err)
	}
	return found, nil
}

// find returns the connections in order, without what the routes tell.
func (q *Query) find(ctx context.Context, c *nfnetlink.Conn) (found []Found, err error) {
	filter := nfnetlink.ConnectionFilter{Family: nfnetlink.FamilyOf(q.Source.Addr())}
	err = c.Connections(ctx, filter, func(e *nfnetlink.Connection) error {
		reply := e.Reply.Flow()
		if q.selects(e, reply) {
			found = append(found, Found{Original: e.Original.Flow(), Reply: reply, Zone: e.Zone})
		}
		return nil
	})
	slices.SortFunc(found, func(a, b Found) int {
		return cmp.Or(compare(a.Original, b.Original), compare(a.Reply, b.Reply), cmp.Compare(a.Zone, b.Zone))
	})
	return slices.Compact(found), err // a walk may list an entry twice
}

func compare(a, b nfnetlink.Flow) int {
	return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), a.Src.Compare(b.Src), a.Dst.Compare(b.Dst))
}

func (q *Query) selects(e *nfnetlink.Connection, reply nfnetlink.Flow) bool {
	if reply.Dst != q.Source {
		return false
	}
	if q.To.IsValid() && q.To != e.Original.Dst && q.To != e.Reply.Src {
		return false
	}
	if q.Protocol != 0 {
		return reply.Protocol == q.Protocol
	}
	switch reply.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
		return true
	}
	return false
}

// addRoutes adds what the routes tell.
func (f *Found) addRoutes(r *routes) {
	src, endpoint := f.Original.Src.Addr(), f.Reply.Src.Addr()
	f.SourceLocal, f.EndpointLocal = r.IsLocal(src), r.IsLocal(endpoint)
	if f.SourceLocal {
		f.Interface = r.name(r.output(endpoint, netip.Addr{}, 0))
		return
	}
	f.Interface = r.OutputInterface(src, endpoint)
}
