// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// nftReader reads the tables of iptables-nft through one netlink socket, which it keeps: closing a
// socket soon after a commit takes the kernel milliseconds.
type nftReader struct{ conn nfnetlink.Conn }

func (r *nftReader) chainNames(f policy.Family, table, only string) (names []string, err error) {
	var chains []nfnetlink.Chain
	if only == "" {
		chains, err = r.conn.Chains(netfilter.LinkOf(f), table)
	} else {
		chains = make([]nfnetlink.Chain, 1)
		chains[0], err = r.conn.Chain(netfilter.LinkOf(f), table, only)
	}
	if errors.Is(err, fs.ErrNotExist) || nfnetlink.Unsupported(err) {
		return nil, nil // no such table or chain, or no nf_tables in the kernel
	}
	for _, chain := range chains {
		if err == nil {
			names = append(names, chain.Name)
		}
	}
	return names, err
}

func (r *nftReader) read(f policy.Family, names []string) (t table, err error) {
	c := &r.conn
	t, _, err = nfnetlink.ConsistentRead(c, func() (t table, err error) {
		nat, err := c.Table(netfilter.LinkOf(f), Table)
		if errors.Is(err, fs.ErrNotExist) {
			return t, nil
		}
		var base nfnetlink.Chain
		if err == nil {
			base, err = c.Chain(netfilter.LinkOf(f), Table, postrouting)
		}
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			t.fault, t.owned = baseChainFault(f, nat, base), netfilter.CheckTableOwner(netfilter.LinkOf(f), nat)
			err = t.read(f, names, func(chain string) ([]nfnetlink.Rule, error) {
				rules, err := c.Rules(netfilter.LinkOf(f), Table, chain)
				if err == nil && len(rules) == 0 { // an empty chain, or none
					_, err = c.Chain(netfilter.LinkOf(f), Table, chain)
				}
				return rules, err
			})
		}
		return t, err
	}, table.same)
	return t, err
}

// Watched returns the chains of the table whose changes concern masquerade chains: in other backends, those of the
// same names are duplicates. Nil chains are unknown.
func Watched(chains []netfilter.OwnedChain) *[]string {
	if chains == nil {
		return nil
	}
	names := []string{postrouting}
	for _, c := range chains {
		names = append(names, c.Chain)
	}
	return &names
}

func (t table) same(u table) bool {
	return t.fault == u.fault && slices.Equal(t.targets, u.targets) && slices.EqualFunc(t.Chains, u.Chains, func(a, b policy.Chain) bool {
		return a.Name == b.Name && a.Owner == b.Owner &&
			slices.EqualFunc(a.Jumps, b.Jumps, policy.Rule.SameReading) && slices.EqualFunc(a.Rules, b.Rules, policy.Rule.SameReading)
	})
}

// baseChainFault returns why the rules of POSTROUTING do not have their usual effect, and the
// remedy; "" if they do. ip-masq does not repair the chain: every program on the node uses table
// nat.
func baseChainFault(f policy.Family, t nfnetlink.Table, c nfnetlink.Chain) string {
	const priority = 100 // NF_IP_PRI_NAT_SRC
	name := "table " + netfilter.LinkOf(f).String() + " " + Table
	want := nfnetlink.Base{Type: "nat", Hook: unix.NF_INET_POST_ROUTING, Priority: priority, Policy: nfnetlink.Accept}
	dropping := want
	dropping.Policy = nfnetlink.Drop
	switch {
	case t.Dormant():
		return fmt.Sprintf("%s is dormant, and none of its chains has an effect; activate it with: nft add %s", name, name)
	case c.Name == "" || c.Base != nil && *c.Base == want: // iptables creates a missing one
		return ""
	case c.Base != nil && *c.Base == dropping:
		return policyFault(f)
	}
	has := "no hook"
	if hooks := builtInChains(); c.Base != nil && int(c.Base.Hook) < len(hooks) {
		has = fmt.Sprintf("type %s hook %s priority %d", c.Base.Type, strings.ToLower(hooks[c.Base.Hook]), c.Base.Priority)
	}
	return fmt.Sprintf("chain %s of %s has %s, not type nat hook postrouting priority %d as iptables makes it; "+
		"delete the chain with nft (iptables then makes it again) and add its other rules again", postrouting, name, has, priority)
}

func policyFault(f policy.Family) string {
	return fmt.Sprintf("chain %s of table %s has policy DROP, so traffic that is not masqueraded is dropped; run: %s -t %s -P %s ACCEPT",
		postrouting, Table, baseName(f), Table, postrouting)
}
