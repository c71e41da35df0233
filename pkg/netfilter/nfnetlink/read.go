// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Attribute numbers that golang.org/x/sys/unix does not have.
const (
	attrTableHandle = 4  // NFTA_TABLE_HANDLE
	attrTableOwner  = 7  // NFTA_TABLE_OWNER
	attrChainFlags  = 10 // NFTA_CHAIN_FLAGS
	attrSetHandle   = 16 // NFTA_SET_HANDLE
)

// initialOnly is a setting that is shown in the network namespace of the system's
// start alone (net_core_table in net/core/sysctl_net_core.c).
const initialOnly = "/proc/sys/net/core/dev_weight"

// Family is a protocol family of netfilter (NFPROTO_*).
type Family uint8

// The families that masquerading is about.
const (
	Inet Family = unix.NFPROTO_INET
	IPv4 Family = unix.NFPROTO_IPV4
	IPv6 Family = unix.NFPROTO_IPV6
)

// String returns the family as nft names it.
func (f Family) String() string {
	switch f {
	case Inet:
		return "inet"
	case IPv4:
		return "ip"
	case IPv6:
		return "ip6"
	}
	return fmt.Sprintf("family-%d", uint8(f))
}

// Generation returns the number that each commit of anybody in the namespace
// raises. A commit that changes nothing does not.
func (c *Conn) Generation() (uint32, error) {
	op := operation{verb: "read nf_tables generation"}
	c.request(unix.NFT_MSG_GETGEN, 0, 0)
	attrs, err := c.get(op, unix.NFT_MSG_NEWGEN)
	if err != nil {
		return 0, err
	}
	var t attrTable
	t.parse(attrs)
	generation := t.u32(unix.NFTA_GEN_ID)
	if t.bad {
		return 0, fmt.Errorf("%s: %w", op, errMalformed)
	}
	return generation, nil
}

// Namespace returns the cookie of the network namespace whose rules these are: a
// number that no other has for as long as the kernel runs. Before Linux 5.14 it is 0
// in the namespace of the system's start, which is there as long as the kernel runs,
// and an error in others: the inode number of a namespace is given again to the next
// one, whose generations begin anew.
func (c *Conn) Namespace() (uint64, error) {
	cookie, err := unix.GetsockoptUint64(c.fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if errors.Is(err, unix.ENOPROTOOPT) && unix.Access(initialOnly, unix.F_OK) == nil {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the cookie of the network namespace: %w", err)
	}
	return cookie, nil
}

// Table is a table of nf_tables.
type Table struct {
	Name   string
	Flags  uint32 // NFT_TABLE_F_*
	Use    uint32 // chains, sets and other objects in it
	Handle uint64
	// Owner is the netlink port of the process that alone may change the table
	// for as long as it lives (NFT_TABLE_F_OWNER); 0 where everybody may.
	Owner uint32
}

// Dormant reports whether the table's base chains are switched off.
func (t Table) Dormant() bool { return t.Flags&unix.NFT_TABLE_F_DORMANT != 0 }

// Table returns a table, or an error that is os.ErrNotExist.
func (c *Conn) Table(family Family, name string) (Table, error) {
	op := operation{"read table", family, name, ""}
	c.request(unix.NFT_MSG_GETTABLE, 0, family)
	c.out.str(unix.NFTA_TABLE_NAME, name)
	attrs, err := c.get(op, unix.NFT_MSG_NEWTABLE)
	if err != nil {
		return Table{}, err
	}
	table, err := decodeTable(attrs)
	if err != nil {
		return Table{}, fmt.Errorf("%s: %w", op, err)
	}
	return table, nil
}

// TableAndChain returns a table and one of its chains, in one request. The chain
// is nil if it does not exist; for the table that is an error, os.ErrNotExist.
func (c *Conn) TableAndChain(family Family, table, chain string) (Table, *Chain, error) {
	ofTable, ofChain := operation{"read table", family, table, ""}, operation{"read chain", family, table, chain}
	c.request(unix.NFT_MSG_GETTABLE, 0, family)
	c.out.str(unix.NFTA_TABLE_NAME, table)
	c.out.endMessage(0)
	second := c.out.beginMessage(messageType(unix.NFT_MSG_GETCHAIN), 0, family, 0)
	c.out.str(unix.NFTA_CHAIN_TABLE, table)
	c.out.str(unix.NFTA_CHAIN_NAME, chain)
	c.out.endMessage(second)
	c.sequence += 2
	setSequence(c.out.b, c.sequence-1)
	setSequence(c.out.b[second:], c.sequence)
	if c.out.err != nil {
		return Table{}, nil, fmt.Errorf("%s: %w", ofTable, c.out.err)
	}
	if err := c.write(ofTable, c.out.b); err != nil {
		return Table{}, nil, err
	}
	attrs, err := c.answer(ofTable, c.sequence-1, unix.NFT_MSG_NEWTABLE)
	if err != nil {
		return Table{}, nil, err
	}
	t, err := decodeTable(attrs)
	if err != nil {
		return Table{}, nil, fmt.Errorf("%s: %w", ofTable, err)
	}
	attrs, err = c.answer(ofChain, c.sequence, unix.NFT_MSG_NEWCHAIN)
	if errors.Is(err, os.ErrNotExist) {
		return t, nil, nil
	}
	if err != nil {
		return Table{}, nil, err
	}
	found, _, err := decodeChain(attrs)
	if err != nil {
		return Table{}, nil, fmt.Errorf("%s: %w", ofChain, err)
	}
	return t, &found, nil
}

// Tables returns the tables of a family, in the kernel's order.
func (c *Conn) Tables(family Family) ([]Table, error) {
	op := operation{verb: "list tables of family " + family.String()}
	c.request(unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP, family)
	return dump(c, op, unix.NFT_MSG_NEWTABLE, func(tables []Table, attrs []byte) ([]Table, error) {
		table, err := decodeTable(attrs)
		if err != nil {
			return tables, err
		}
		return append(tables, table), nil
	})
}

func decodeTable(attrs []byte) (Table, error) {
	var t attrTable
	t.parse(attrs)
	table := Table{
		Name:   t.str(unix.NFTA_TABLE_NAME),
		Flags:  t.optU32(unix.NFTA_TABLE_FLAGS),
		Use:    t.optU32(unix.NFTA_TABLE_USE),
		Handle: t.optU64(attrTableHandle),
		Owner:  t.optU32(attrTableOwner),
	}
	if t.bad {
		return Table{}, errMalformed
	}
	return table, nil
}

// Chain is a chain of nf_tables.
type Chain struct {
	Name   string
	Handle uint64
	Use    uint32 // rules in it and jumps to it
	Flags  uint32 // NFT_CHAIN_*
	Base   *Base  // nil for a chain that is only jumped to
}

// Base is what hooks a chain into the way of packets.
type Base struct {
	Type     string // "nat", "filter", "route"
	Hook     uint32 // NF_INET_*
	Priority int32
	Policy   VerdictCode // Accept or Drop
}

// Chain returns a chain, or an error that is os.ErrNotExist if the chain or the
// table does not exist.
func (c *Conn) Chain(family Family, table, name string) (Chain, error) {
	op := operation{"read chain", family, table, name}
	c.request(unix.NFT_MSG_GETCHAIN, 0, family)
	c.out.str(unix.NFTA_CHAIN_TABLE, table)
	c.out.str(unix.NFTA_CHAIN_NAME, name)
	attrs, err := c.get(op, unix.NFT_MSG_NEWCHAIN)
	if err != nil {
		return Chain{}, err
	}
	chain, _, err := decodeChain(attrs)
	if err != nil {
		return Chain{}, fmt.Errorf("%s: %w", op, err)
	}
	return chain, nil
}

// Chains returns the chains of a table, in the kernel's order. A missing table
// has none. The kernel goes through the chains of all tables of the family for
// it: where one chain is of interest, Chain is cheaper.
func (c *Conn) Chains(family Family, table string) ([]Chain, error) {
	op := operation{"list chains of", family, table, ""}
	c.request(unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, family)
	return dump(c, op, unix.NFT_MSG_NEWCHAIN, func(chains []Chain, attrs []byte) ([]Chain, error) {
		chain, of, err := decodeChain(attrs)
		if err == nil && of == table {
			chains = append(chains, chain)
		}
		return chains, err
	})
}

func decodeChain(attrs []byte) (chain Chain, table string, err error) {
	var t attrTable
	t.parse(attrs)
	table = t.str(unix.NFTA_CHAIN_TABLE)
	chain = Chain{
		Name:   t.str(unix.NFTA_CHAIN_NAME),
		Handle: t.optU64(unix.NFTA_CHAIN_HANDLE),
		Use:    t.optU32(unix.NFTA_CHAIN_USE),
		Flags:  t.optU32(attrChainFlags),
	}
	if t.has(unix.NFTA_CHAIN_HOOK) {
		var hook attrTable
		hook.parse(t.at[unix.NFTA_CHAIN_HOOK])
		chain.Base = &Base{
			Type:     t.str(unix.NFTA_CHAIN_TYPE),
			Hook:     hook.u32(unix.NFTA_HOOK_HOOKNUM),
			Priority: int32(hook.u32(unix.NFTA_HOOK_PRIORITY)),
			Policy:   VerdictCode(int32(t.u32(unix.NFTA_CHAIN_POLICY))),
		}
		t.bad = t.bad || hook.bad
	}
	if t.bad {
		return Chain{}, "", errMalformed
	}
	return chain, table, nil
}
