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

// natRule is a rule of table nat, in a variant of iptables.
type natRule struct {
	nfnetlink.Rule
	variant string
}

// natRules returns the rules of a chain of table nat, of all chains for "". With an error, it has what could
// be read.
func natRules(chain string) (found []natRule, err error) {
	err = withConn(func(c *nfnetlink.Conn) error {
		for _, f := range policy.Families() {
			rules, err := c.Rules(netfilter.LinkOf(f), iptables.Table, chain)
			if err != nil {
				return err
			}
			for _, r := range rules {
				found = append(found, natRule{r, netfilter.VariantNFT})
			}
		}
		return nil
	})
	for _, f := range policy.Families() {
		chains, failed := iptables.Legacy(f, iptables.Table)
		err = errors.Join(err, failed)
		for name, c := range chains {
			if chain != "" && chain != name {
				continue
			}
			for _, r := range c.Rules {
				found = append(found, natRule{r, netfilter.VariantLegacy})
			}
		}
	}
	return found, err
}

// Variants returns how many rules table nat has in each variant of iptables that has some. It leaves
// iptables-legacy out if all of its rules are in owned chains or jump to them.
func Variants(owned func(c netfilter.Choice, chain string) bool) (map[string]int, error) {
	rules, err := natRules("")
	legacy := netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantLegacy}
	count := map[string]int{}
	allOwned := true
	for _, r := range rules {
		count[r.variant]++
		if r.variant == legacy.Variant {
			allOwned = allOwned && (owned(legacy, r.Chain) || owned(legacy, targetOf(r.Rule)))
		}
	}
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
	rules, err := natRules("KUBE-NODEPORTS")
	for _, r := range rules {
		port, ok := destinationPort(r.Rule)
		if ok {
			ports = append(ports, port)
		}
	}
	inMaps, errMaps := nodePortsInMaps()
	ports = append(ports, inMaps...)
	slices.Sort(ports)
	return slices.Compact(ports), errors.Join(err, errMaps)
}

// nodePortsInMaps returns those of kube-proxy in mode nftables: the keys of a map of protocol . port.
func nodePortsInMaps() (ports []uint16, err error) {
	err = withConn(func(c *nfnetlink.Conn) error {
		for _, f := range policy.Families() {
			keys, err := c.Keys(netfilter.LinkOf(f), "kube-proxy", "service-nodeports")
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
	})
	return ports, err
}

// destinationPort returns the port that a rule matches: tcp dport 30080.
func destinationPort(r nfnetlink.Rule) (port uint16, ok bool) {
	const portAt = 2 // in the headers of TCP, UDP and SCTP
	loaded := false
	for _, e := range r.Exprs {
		switch e := e.(type) {
		case nfnetlink.Match:
			first, last, isPorts := destinationPorts(e)
			if isPorts && first == last {
				return first, true
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

// destinationPorts returns the first and the last destination port of a match of iptables. In struct xt_tcp
// and xt_udp they follow the source ports, in struct xt_sctp_info they come first.
func destinationPorts(m nfnetlink.Match) (first, last uint16, ok bool) {
	at := 0
	switch m.Xt {
	case "tcp", "udp":
		at = 4
	case "sctp":
	default:
		return 0, 0, false
	}
	if len(m.Info) < at+4 {
		return 0, 0, false
	}
	return binary.NativeEndian.Uint16(m.Info[at:]), binary.NativeEndian.Uint16(m.Info[at+2:]), true
}
