// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Services is what kube-proxy's and portmap's rules say about packets to Services and host ports.
type Services struct {
	Marks     []Mark
	NodePorts []uint16              // in use, sorted
	Self      map[policy.Family]int // elements of netfilter.SelfSet
}

// Mark is the packet mark by which a program finds the packets that it masquerades.
type Mark struct {
	Place
	Bits policy.Mark
}

// nodePortsChain is kube-proxy's chain with a rule for each node port.
const nodePortsChain = "KUBE-NODEPORTS"

// serviceChains are the chains in table nat of iptables in which kube-proxy and the plugin portmap mark packets,
// and that of node ports.
func serviceChains() []string {
	return []string{"KUBE-MARK-MASQ", "CNI-HOSTPORT-SETMARK", nodePortsChain}
}

// ReadServices reads the rules for Services in the network namespace of the calling thread. Rules that cannot
// be read are in the error; the others are returned with it.
func ReadServices(ctx context.Context) (Services, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := ctx.Err(); err != nil {
		return Services{}, err
	}
	s := Services{Self: map[policy.Family]int{}}
	errs := []error{withTables(func(c *nfnetlink.Conn) error {
		for _, f := range policy.Families() {
			at := Place{Backend: policy.IPTables, Variant: netfilter.VariantNFT, Family: f, Table: natTable}
			for _, at.Chain = range serviceChains() {
				if err := s.read(c, at); err != nil {
					return err
				}
			}
			at = Place{Backend: policy.NFTables, Family: f, Table: "kube-proxy", Chain: "mark-for-masquerade"}
			if err := s.read(c, at); err != nil {
				return err
			}
			keys, err := c.Keys(linkOf(f), at.Table, "service-nodeports") // a map of protocol . port
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			if s.Self[f], err = c.Len(linkOf(f), netfilter.GuardTable, netfilter.SelfSet); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			for _, key := range keys { // each part is padded to 4 bytes
				if len(key) == 8 {
					s.NodePorts = append(s.NodePorts, binary.BigEndian.Uint16(key[4:]))
				}
			}
		}
		return nil
	})}
	for _, f := range policy.Families() {
		chains, err := iptables.Legacy(f, natTable)
		errs = append(errs, err)
		at := Place{Backend: policy.IPTables, Variant: netfilter.VariantLegacy, Family: f, Table: natTable}
		for _, at.Chain = range serviceChains() {
			s.add(at, chains[at.Chain])
		}
	}
	slices.Sort(s.NodePorts)
	s.NodePorts = slices.Compact(s.NodePorts)
	return s, errors.Join(errs...)
}

// read reads a chain of nf_tables.
func (s *Services) read(c *nfnetlink.Conn, at Place) error {
	rules, err := c.Rules(linkOf(at.Family), at.Table, at.Chain)
	s.add(at, rules)
	return err
}

// add adds the rules of a chain.
func (s *Services) add(at Place, rules []nfnetlink.Rule) {
	mark := Mark{Place: at}
	for _, r := range rules {
		mark.Bits |= markedBits(r)
		if port, ok := destinationPort(r); ok && at.Chain == nodePortsChain {
			s.NodePorts = append(s.NodePorts, port)
		}
	}
	if mark.Bits != 0 {
		s.Marks = append(s.Marks, mark)
	}
}

// markedBits returns the bits of the packet mark that a rule sets: -j MARK --or-mark 0x4000,
// meta mark set mark or 0x4000.
func markedBits(r nfnetlink.Rule) (bits policy.Mark) {
	var value []byte // in the register
	for _, e := range r.Exprs {
		set := false
		switch e := e.(type) {
		case nfnetlink.Target: // struct xt_mark_tginfo2
			value, set = e.Info, e.Xt == "MARK"
		case nfnetlink.Immediate:
			value = e.Data
		case nfnetlink.Bitwise:
			value = e.Xor
		case nfnetlink.Meta:
			set = e.Set && e.Key == unix.NFT_META_MARK
		}
		if set && len(value) >= 4 {
			bits |= policy.Mark(binary.NativeEndian.Uint32(value))
		}
	}
	return bits
}

// destinationPort returns the port that a rule matches: tcp dport 30080.
func destinationPort(r nfnetlink.Rule) (port uint16, ok bool) {
	const portAt = 2 // in the headers of TCP, UDP and SCTP
	loaded := false
	for _, e := range r.Exprs {
		switch e := e.(type) {
		case nfnetlink.Match: // struct xt_tcp, xt_udp, xt_sctp: first and last source port, the same of the destination
			isTransport := e.Xt == "tcp" || e.Xt == "udp" || e.Xt == "sctp"
			if isTransport && len(e.Info) >= 8 && e.Info[4] == e.Info[6] && e.Info[5] == e.Info[7] {
				return binary.NativeEndian.Uint16(e.Info[4:]), true
			}
		case nfnetlink.Payload:
			loaded = e.Base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && e.Offset == portAt && e.Len == 2
		case nfnetlink.Cmp:
			if loaded && e.Op == nfnetlink.Equal && len(e.Data) == 2 {
				return binary.BigEndian.Uint16(e.Data), true
			}
		}
	}
	return 0, false
}
