// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/containernetworking/plugins/pkg/utils/sysctl"
	"golang.org/x/sys/unix"
)

// attrTableOwner is NFTA_TABLE_OWNER, which golang.org/x/sys/unix does not have.
const attrTableOwner = 7

// Family is a protocol family of netfilter (NFPROTO_*). Those of IPv4 and IPv6 have the numbers of AF_INET
// and AF_INET6.
type Family uint8

// The families that masquerading is about.
const (
	Inet Family = unix.NFPROTO_INET
	IPv4 Family = unix.NFPROTO_IPV4
	IPv6 Family = unix.NFPROTO_IPV6
)

// FamilyOf returns the family of an address.
func FamilyOf(a netip.Addr) Family {
	if a.Is6() {
		return IPv6
	}
	return IPv4
}

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

// read returns the object that an operation names.
func read[T any](
	c *Conn, op operation, number, nameAttr uint16, decode func(*attrTable) T,
) (object T, err error) {
	get := c.get(op, number, 0, nameAttr, func(t *attrTable) { object = decode(t) })
	_, err = c.query(context.Background(), get)
	return object, err
}

// list dumps objects, which add appends to those before. Outside of a ConsistentRead of the caller, the dump is one
// by itself.
func list[T any](
	c *Conn, op operation, number, nameAttr uint16, add func([]T, *attrTable) []T,
) ([]T, error) {
	var found []T
	r := c.get(op, number, unix.NLM_F_DUMP, nameAttr, func(t *attrTable) { found = add(found, t) })
	readOnce := func() ([]T, error) {
		found = nil
		_, err := c.query(context.Background(), r)
		return found, err
	}
	objects, _, err := ConsistentRead(c, readOnce, nil)
	return objects, err
}

// each returns a function that decodes one object and appends it, as list needs it.
func each[T any](decode func(*attrTable) T) func([]T, *attrTable) []T {
	return func(objects []T, t *attrTable) []T { return append(objects, decode(t)) }
}

// ConsistentRead calls read, which uses c, until everything that it read belongs to one generation, and
// returns that. The kernel has no generation 0, which is returned in three cases:
//
//   - Other programs commit too often, such as every 10 ms beside a set of 10,000 elements. Then a reading
//     counts that found the same as the one before, by the function same: two torn dumps are not torn alike.
//   - There is no function same, or the objects change all the time. The last reading may lack rules and
//     elements, so a caller reads again before it acts on a difference.
//   - It is a part of another ConsistentRead of c, which has the generation.
//
// If a commit happens during a dump, the dump can lack rules, with the same generation in the headers
// of its messages: the generation is read before and after. The flag NLM_F_DUMP_INTR was set for 2 of
// 232 torn dumps only. The generation has to be read while no commit is under way: the kernel raises
// it first and unlinks objects afterwards.
func ConsistentRead[T any](
	c *Conn, read func() (T, error), same func(earlier, later T) bool,
) (found T, generation uint32, err error) {
	const attempts, usualLimit = 50, 300 * time.Millisecond
	if c.consistent { // it is a part of another one
		found, err = read()
		return found, 0, err
	}
	c.consistent = true
	defer func() { c.consistent = false }()
	begun, limit := time.Now(), cmp.Or(c.consistentLimit, usualLimit)
	isComplete := false // the last reading did not fail
	for n := 0; n < attempts && time.Since(begun) < limit; n++ {
		before, isQuiet, err := c.quietGeneration()
		if err != nil {
			return found, 0, err
		}
		if !isQuiet && same == nil {
			continue
		}
		earlier, hasEarlier := found, isComplete
		var failure error
		found, failure = read()
		isComplete = failure == nil
		after, err := c.Generation()
		if err != nil {
			return found, 0, errors.Join(failure, err)
		}
		if isQuiet && after == before {
			return found, before, failure
		}
		mayCompare := hasEarlier && isComplete && same != nil
		if mayCompare && same(earlier, found) {
			return found, 0, nil
		}
	}
	found, err = read()
	return found, 0, err
}

// quietGeneration returns the generation, and whether no commit was under way when it was read.
func (c *Conn) quietGeneration() (generation uint32, isQuiet bool, err error) {
	generation, err = c.Generation()
	if err != nil {
		return 0, false, err
	}
	err = c.awaitCommit(generation)
	if errors.Is(err, ErrStale) {
		return generation, false, nil
	}
	return generation, err == nil, err
}

// awaitCommit returns when no commit is under way, or ErrStale if there was one since the given
// generation. It sends an empty batch, as the kernel handles one batch at a time.
func (c *Conn) awaitCommit(generation uint32) error {
	_, err := c.transact(operation{verb: "wait for nf_tables commits"}, &Batch{Generation: generation}, true)
	return err
}

// Generation returns the ruleset generation, which each commit that changes something raises.
func (c *Conn) Generation() (uint32, error) {
	op := operation{verb: "read nf_tables generation"}
	return read(c, op, unix.NFT_MSG_GETGEN, 0, func(t *attrTable) uint32 { return t.u32(unix.NFTA_GEN_ID) })
}

// Namespace returns the cookie of the network namespace, which the kernel gives to no other one.
// Before Linux 5.14 it is 0 in the initial namespace and an error in others. The inode number is no substitute: the
// kernel uses it again.
func (c *Conn) Namespace() (uint64, error) {
	// This sysctl exists in the initial network namespace only (net_core_table in sysctl_net_core.c).
	const initialOnly = "net/core/dev_weight"
	if err := c.open(); err != nil {
		return 0, err
	}
	cookie, err := unix.GetsockoptUint64(c.fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if errors.Is(err, unix.ENOPROTOOPT) {
		_, errOther := sysctl.Sysctl(initialOnly)
		isInitial := errOther == nil
		if isInitial {
			return 0, nil
		}
	}
	if err != nil {
		return 0, fmt.Errorf("read the cookie of the network namespace: %w", err)
	}
	return cookie, nil
}

// Table is a table of nf_tables.
type Table struct {
	Name  string
	Flags uint32 // NFT_TABLE_F_*
	Use   uint32 // number of chains, sets and other objects in it
	// Owner is the netlink port of the only process that may change it (NFT_TABLE_F_OWNER), or 0.
	Owner uint32
}

// Dormant reports whether the table's base chains are switched off.
func (t Table) Dormant() bool { return t.Flags&unix.NFT_TABLE_F_DORMANT != 0 }

// Table returns a table, or an error that is os.ErrNotExist.
func (c *Conn) Table(family Family, name string) (Table, error) {
	return read(c, operation{"read table", family, name, ""}, unix.NFT_MSG_GETTABLE, 0, decodeTable)
}

// Tables returns the tables of a family, in the kernel's order.
func (c *Conn) Tables(family Family) ([]Table, error) {
	op := operation{verb: "list tables of family " + family.String(), family: family}
	return list(c, op, unix.NFT_MSG_GETTABLE, 0, each(decodeTable))
}

func decodeTable(t *attrTable) Table {
	return Table{
		Name:  t.str(unix.NFTA_TABLE_NAME),
		Flags: t.optU32(unix.NFTA_TABLE_FLAGS),
		Use:   t.optU32(unix.NFTA_TABLE_USE),
		Owner: t.optU32(attrTableOwner),
	}
}

// Chain is a chain of nf_tables.
type Chain struct {
	Table, Name string
	Base        *Base // nil for a chain that is not a base chain
}

// Base is the hook of a base chain.
type Base struct {
	Type     string // "nat", "filter", "route"
	Hook     uint32 // NF_INET_*
	Priority int32
	Policy   VerdictCode // Accept or Drop
}

// Chain returns a chain, or an error that is os.ErrNotExist if the chain or the table does not exist.
func (c *Conn) Chain(family Family, table, name string) (Chain, error) {
	op := operation{"read chain", family, table, name}
	return read(c, op, unix.NFT_MSG_GETCHAIN, unix.NFTA_CHAIN_NAME, decodeChain)
}

// Chains returns the chains of a table, or those of all tables if the table is "", in the kernel's order. A
// missing table has none. The kernel walks the chains of all tables of the family, so Chain is cheaper for a
// single one.
func (c *Conn) Chains(family Family, table string) ([]Chain, error) {
	op := operation{"list chains of", family, table, ""}
	if table == "" {
		op.verb = "list chains of family " + family.String()
	}
	chains, err := list(c, op, unix.NFT_MSG_GETCHAIN, 0, each(decodeChain))
	if table == "" {
		return chains, err
	}
	isOfAnother := func(chain Chain) bool { return chain.Table != table }
	return slices.DeleteFunc(chains, isOfAnother), err
}

func decodeChain(t *attrTable) Chain {
	chain := Chain{Table: t.str(unix.NFTA_CHAIN_TABLE), Name: t.str(unix.NFTA_CHAIN_NAME)}
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
	return chain
}
