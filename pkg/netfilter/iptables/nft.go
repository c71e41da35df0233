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

func (r *nftReader) chainNames(f policy.Family, table, only string) ([]string, error) {
	chains, err := r.chains(f, table, only)
	if errors.Is(err, fs.ErrNotExist) || nfnetlink.Unsupported(err) {
		return nil, nil // no such table or chain, or no nf_tables in the kernel
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, chain := range chains {
		names = append(names, chain.Name)
	}
	return names, nil
}

// chains returns the chains of a table, or one of them.
func (r *nftReader) chains(f policy.Family, table, only string) ([]nfnetlink.Chain, error) {
	if only == "" {
		return r.conn.Chains(netfilter.LinkOf(f), table)
	}
	chain, err := r.conn.Chain(netfilter.LinkOf(f), table, only)
	return []nfnetlink.Chain{chain}, err
}

func (r *nftReader) read(f policy.Family, names []string) (table, error) {
	readOnce := func() (table, error) { return r.readOnce(f, names) }
	t, _, err := nfnetlink.ConsistentRead(&r.conn, readOnce, table.same)
	return t, err
}

// readOnce reads the table while other programs may commit.
func (r *nftReader) readOnce(f policy.Family, names []string) (t table, err error) {
	link := netfilter.LinkOf(f)
	nat, err := r.conn.Table(link, Table)
	if errors.Is(err, fs.ErrNotExist) {
		return t, nil
	}
	if err != nil {
		return t, err
	}
	base, err := r.conn.Chain(link, Table, postrouting)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return t, err
	}
	t.fault = baseChainFault(f, nat, base)
	t.ownerError = netfilter.CheckTableOwner(link, nat)
	err = t.read(f, names, func(chain string) ([]nfnetlink.Rule, error) { return r.rules(f, chain) })
	return t, err
}

// rules returns the rules of a chain, or fs.ErrNotExist.
func (r *nftReader) rules(f policy.Family, chain string) ([]nfnetlink.Rule, error) {
	rules, err := r.conn.Rules(netfilter.LinkOf(f), Table, chain)
	if err == nil && len(rules) == 0 { // an empty chain, or none
		_, err = r.conn.Chain(netfilter.LinkOf(f), Table, chain)
	}
	return rules, err
}

// Watched returns the names of the chains in table nat that a Listener has to watch: POSTROUTING and
// the owned chains of every backend, as a chain of the same name here is a duplicate. If the owned
// chains are not known (nil), it returns nil, which stands for all chains.
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
	if t.fault != u.fault || !slices.Equal(t.targets, u.targets) {
		return false
	}
	return slices.EqualFunc(t.Chains, u.Chains, sameReading)
}

func sameReading(a, b policy.Chain) bool {
	return a.Name == b.Name && a.Owner == b.Owner &&
		slices.EqualFunc(a.Jumps, b.Jumps, policy.Rule.SameReading) &&
		slices.EqualFunc(a.Rules, b.Rules, policy.Rule.SameReading)
}

// baseChainFault returns why the rules of POSTROUTING do not have their usual effect, and the
// remedy; "" if they do. ip-masq reports such a chain and does not repair it: every program on the
// node uses table nat, and to activate it would put the rules of all of them into force.
func baseChainFault(f policy.Family, t nfnetlink.Table, c nfnetlink.Chain) string {
	const priority = 100 // NF_IP_PRI_NAT_SRC
	name := "table " + netfilter.LinkOf(f).String() + " " + Table
	if t.Dormant() {
		return name + " is dormant, and none of its chains has an effect; activate it with: nft add " + name
	}
	if c.Name == "" { // iptables creates a missing one
		return ""
	}
	want := nfnetlink.Base{
		Type:     "nat",
		Hook:     unix.NF_INET_POST_ROUTING,
		Priority: priority,
		Policy:   nfnetlink.Accept,
	}
	if c.Base != nil && *c.Base == want {
		return ""
	}
	dropping := want
	dropping.Policy = nfnetlink.Drop
	if c.Base != nil && *c.Base == dropping {
		return policyFault(f)
	}
	return fmt.Sprintf("chain %s of %s has %s, not type nat hook postrouting priority %d as iptables makes "+
		"it; delete the chain with nft (iptables then makes it again) and add its other rules again",
		postrouting, name, describeHook(c.Base), priority)
}

func describeHook(base *nfnetlink.Base) string {
	hooks := builtInChains()
	if base == nil || int(base.Hook) >= len(hooks) {
		return "no hook"
	}
	hook := strings.ToLower(hooks[base.Hook])
	return fmt.Sprintf("type %s hook %s priority %d", base.Type, hook, base.Priority)
}

func policyFault(f policy.Family) string {
	return fmt.Sprintf("chain %s of table %s has policy DROP, so traffic that is not masqueraded is "+
		"dropped; run: %s -t %s -P %s ACCEPT", postrouting, Table, baseName(f), Table, postrouting)
}
