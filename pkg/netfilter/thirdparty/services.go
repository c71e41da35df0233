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

// natRules calls a function with each rule of a chain of table nat, of all chains for "", and its variant of iptables.
func natRules(chain string, each func(variant string, r nfnetlink.Rule)) error {
	errs := []error{withTables(func(c *nfnetlink.Conn) error {
		for _, f := range policy.Families() {
			rules, err := c.Rules(netfilter.LinkOf(f), iptables.Table, chain)
			if err != nil {
				return err
			}
			for _, r := range rules {
				each(netfilter.VariantNFT, r)
			}
		}
		return nil
	})}
	for _, f := range policy.Families() {
		chains, err := iptables.Legacy(f, iptables.Table)
		errs = append(errs, err)
		for name, rules := range chains {
			for _, r := range rules {
				if chain == "" || chain == name {
					each(netfilter.VariantLegacy, r)
				}
			}
		}
	}
	return errors.Join(errs...)
}

// Variants returns how many rules table nat has in each variant of iptables that has some. It leaves iptables-legacy out if
// all of its rules are in owned chains or jump to them.
func Variants(owned func(c netfilter.Choice, chain string) bool) (map[string]int, error) {
	count := map[string]int{}
	allOwned := true
	err := natRules("", func(variant string, r nfnetlink.Rule) {
		count[variant]++
		legacy := netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantLegacy}
		if variant == legacy.Variant && !owned(legacy, r.Chain) && !owned(legacy, targetOf(r)) {
			allOwned = false
		}
	})
	if allOwned {
		delete(count, netfilter.VariantLegacy)
	}
	return count, err
}

// targetOf returns the chain that a rule jumps or goes to, or "".
func targetOf(r nfnetlink.Rule) string {
	for _, e := range r.Exprs {
		if v, is := e.(nfnetlink.Verdict); is {
			return v.Chain
		}
	}
	return ""
}

// NodePorts returns the node ports for which kube-proxy has rules, sorted, also with an error.
func NodePorts() (ports []uint16, err error) {
	err = natRules("KUBE-NODEPORTS", func(_ string, r nfnetlink.Rule) {
		if port, ok := destinationPort(r); ok {
			ports = append(ports, port)
		}
	})
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
