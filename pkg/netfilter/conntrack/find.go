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
func Find(ctx context.Context, q Query) (found []Found, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("find connections: %w", err)
		}
	}()
	protocols := []uint8{q.Protocol}
	if q.Protocol == 0 {
		protocols = []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP}
	}
	var c nfnetlink.Conn
	r := newRoutes()
	defer func() { err = errors.Join(err, c.Close(), r.socket.Close()) }()
	filter := nfnetlink.ConnectionFilter{Family: nfnetlink.FamilyOf(q.Source.Addr())}
	err = c.Connections(ctx, filter, func(e *nfnetlink.Connection) error {
		reply := e.Reply.Flow()
		if reply.Dst == q.Source && slices.Contains(protocols, reply.Protocol) &&
			(!q.To.IsValid() || q.To == e.Original.Dst || q.To == e.Reply.Src) {
			found = append(found, Found{Original: e.Original.Flow(), Reply: reply, Zone: e.Zone})
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	compare := func(a, b nfnetlink.Flow) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), a.Src.Compare(b.Src), a.Dst.Compare(b.Dst))
	}
	slices.SortFunc(found, func(a, b Found) int {
		return cmp.Or(compare(a.Original, b.Original), compare(a.Reply, b.Reply), cmp.Compare(a.Zone, b.Zone))
	})
	found = slices.Compact(found) // a walk may list an entry twice
	for i := range found {
		f := &found[i]
		src, endpoint := f.Original.Src.Addr(), f.Reply.Src.Addr()
		f.SourceLocal, f.EndpointLocal = r.IsLocal(src), r.IsLocal(endpoint)
		if f.SourceLocal {
			f.Interface = r.name(r.output(endpoint, netip.Addr{}, 0))
		} else {
			f.Interface = r.OutputInterface(src, endpoint)
		}
	}
	return found, r.err
}
