// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"net/netip"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// routes answers questions about routing tables. After an error the answers mean nothing.
type routes struct {
	socket     *nfnetlink.Conn
	local      map[nfnetlink.Family]policy.Ranges
	interfaces map[[2]netip.Addr]string // at most maxRoutes, by source and destination
	err        error                    // the first one
}

const maxRoutes = 10_000

func newRoutes() *routes {
	return &routes{
		socket:     nfnetlink.NewRouteConn(),
		local:      map[nfnetlink.Family]policy.Ranges{},
		interfaces: map[[2]netip.Addr]string{},
	}
}

// IsLocal implements policy.NodeRoutes. A transparent proxy has a local route to every address.
func (r *routes) IsLocal(a netip.Addr) bool {
	family := nfnetlink.FamilyOf(a)
	local, known := r.local[family]
	if !known && r.err == nil {
		var prefixes []netip.Prefix
		prefixes, r.err = r.socket.Local(family)
		local = policy.RangesOf(prefixes...)
		r.local[family] = local
	}
	return r.err == nil && local.Contains(a)
}

// OutputInterface implements policy.NodeRoutes. The source's own route is where its packets come in.
func (r *routes) OutputInterface(src, dst netip.Addr) string {
	key := [2]netip.Addr{src, dst}
	name, known := r.interfaces[key]
	if known {
		return name
	}
	in := r.output(src, netip.Addr{}, 0)
	if in != 0 {
		name = r.name(r.output(dst, src, in))
	}
	if len(r.interfaces) == maxRoutes {
		clear(r.interfaces)
	}
	r.interfaces[key] = name
	return name
}

func (r *routes) output(dst, src netip.Addr, in uint32) (out uint32) {
	if r.err == nil {
		out, r.err = r.socket.Output(dst, src, in)
	}
	return out
}

// name returns the name of an interface, "" if there is none with the index.
func (r *routes) name(index uint32) string {
	if index == 0 || r.err != nil {
		return ""
	}
	var link nfnetlink.Link
	link, r.err = r.socket.Link(index, "")
	return link.Name
}
