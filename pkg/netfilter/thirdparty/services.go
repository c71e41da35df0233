// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"encoding/binary"
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// natRules returns the rules of a chain of table nat, of all chains for "", by variant of iptables.
func natRules(chain string) (map[string][]nfnetlink.Rule, error) {
	rules := map[string][]nfnetlink.Rule{}
	err := withTables(func(c *nfnetlink.Conn) error {
		for _, f := range policy.Families() {
			all, err := c.Rules(netfilter.LinkOf(f), iptables.Table, chain)
			if err != nil {
				return err
			}
			rules[netfilter.VariantNFT] = append(rules[netfilter.VariantNFT], all...)
		}
		return nil
	})
	for _, f := range policy.Families() {
		chains, failed := iptables.Legacy(f, iptables.Table)
		err = errors.Join(err, failed)
		for name, all := range chains {
			if chain == "" || chain == name {
				rules[netfilter.VariantLegacy] = append(rules[netfilter.VariantLegacy], all...)
			}
		}
	}
	return rules, err
}

// Variants returns how many rules table nat has in each variant of iptables that has some.
func Variants() (map[string]int, error) {
	rules, err := natRules("")
	count := map[string]int{}
	for variant, all := range rules {
		if len(all) > 0 {
			count[variant] = len(all)
		}
	}
	return count, err
}

// NodePorts returns the node ports for which kube-proxy has rules, sorted, also with an error.
func NodePorts() (ports []uint16, err error) {
	rules, err := natRules("KUBE-NODEPORTS")
	for _, all := range rules {
		for _, r := range all {
			if port, ok := destinationPort(r); ok {
				ports = append(ports, port)
			}
		}
	}
	err = errors.Join(err, withTables(func(c *nfnetlink.Conn) error {
		for _, f := range policy.Families() {
			keys, err := c.Keys(netfilter.LinkOf(f), "kube-proxy", "service-nodeports") // a map of protocol . port
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			for _, key := range keys { // each part is padded to 4 bytes
				if len(key) == 8 {
					ports = append(ports, binary.BigEndian.Uint16(key[4:]))
				}
			}
		}
		return nil
	}))
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
