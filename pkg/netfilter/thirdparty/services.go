// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"os"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// eachNAT calls a function for the table nat of each variant of iptables and family, in the network namespace of the
// calling thread. The function that it is given returns the rules of a chain, of all chains for "". The connection is nil
// for iptables-legacy, and on a kernel without nf_tables. No table is created.
func eachNAT(
	ctx context.Context, body func(variant string, f policy.Family, rules func(chain string) ([]nfnetlink.Rule, error), c *nfnetlink.Conn) error,
) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := ctx.Err(); err != nil {
		return err
	}
	errs := []error{withTables(func(c *nfnetlink.Conn) error {
		for _, f := range policy.Families() {
			rules := func(chain string) ([]nfnetlink.Rule, error) { return c.Rules(linkOf(f), natTable, chain) }
			if err := body(netfilter.VariantNFT, f, rules, c); err != nil {
				return err
			}
		}
		return nil
	})}
	for _, f := range policy.Families() {
		rules := func(chain string) ([]nfnetlink.Rule, error) {
			chains, err := iptables.Legacy(f, natTable)
			if chain == "" {
				return slices.Concat(slices.Collect(maps.Values(chains))...), err
			}
			return chains[chain], err
		}
		errs = append(errs, body(netfilter.VariantLegacy, f, rules, nil))
	}
	return errors.Join(errs...)
}

// Variants returns how many rules table nat has in each variant of iptables that has some, of both families and all
// programs, in the network namespace of the calling thread.
func Variants(ctx context.Context) (map[string]int, error) {
	count := map[string]int{}
	err := eachNAT(ctx, func(variant string, _ policy.Family, rules func(string) ([]nfnetlink.Rule, error), _ *nfnetlink.Conn) error {
		all, err := rules("")
		if len(all) > 0 {
			count[variant] += len(all)
		}
		return err
	})
	return count, err
}

// NodePorts returns the node ports for which kube-proxy has rules, sorted, in the network namespace of the calling thread.
// Rules that cannot be read are in the error; the ports of the others are returned with it.
func NodePorts(ctx context.Context) (ports []uint16, err error) {
	err = eachNAT(ctx, func(_ string, f policy.Family, rules func(string) ([]nfnetlink.Rule, error), c *nfnetlink.Conn) error {
		all, err := rules("KUBE-NODEPORTS")
		for _, r := range all {
			if port, ok := destinationPort(r); ok {
				ports = append(ports, port)
			}
		}
		if c == nil || err != nil {
			return err
		}
		keys, err := c.Keys(linkOf(f), "kube-proxy", "service-nodeports") // a map of protocol . port
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		for _, key := range keys { // each part is padded to 4 bytes
			if len(key) == 8 {
				ports = append(ports, binary.BigEndian.Uint16(key[4:]))
			}
		}
		return err
	})
	slices.Sort(ports)
	return slices.Compact(ports), err
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
