// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Ruleset is the base chains of one family at a hook, in the order in which packets meet them, with the
// chains and sets that they use. It is one reading of the kernel: a question about it reads nothing.
type Ruleset struct {
	family policy.Family
	hooks  []*baseChain
}

// Place is a chain in the kernel.
type Place struct {
	Backend      policy.Backend
	Variant      string // of iptables
	Family       policy.Family
	Table, Chain string
	Owner        policy.Owner // as a comment in the chain states, zero before the chain is read
}

// Rule is a rule of another program.
type Rule struct {
	Place
	Comment string
	Exprs   []nfnetlink.Expr
	table   *table
}

// MasqueradeRule returns a rule that masquerades all packets, for tests of what is said about rules.
func MasqueradeRule(at Place) *Rule {
	return &Rule{Place: at, Exprs: []nfnetlink.Expr{nfnetlink.Masq{}}}
}

func (r *Rule) set(name string) *set { return r.table.sets[name] }

// baseChain is a base chain of a table.
type baseChain struct {
	*table
	name     string
	isNAT    bool
	priority int32
	drop     *Rule // its policy, if that is to drop
}

// position is the priority at the hook. The kernel has all NAT chains called at one place, whatever theirs
// are.
func (b *baseChain) position() int32 {
	if b.isNAT {
		return prioritySourceNAT
	}
	return b.priority
}

// compare orders base chains as the kernel calls them: those of NAT behind others at one position.
func (b *baseChain) compare(other *baseChain) int {
	order := cmp.Compare(b.position(), other.position())
	if order == 0 && b.isNAT != other.isNAT {
		if b.isNAT {
			return 1
		}
		return -1
	}
	return cmp.Or(order, cmp.Compare(b.priority, other.priority))
}

// isBehindNAT reports whether packets get to the chain after they were translated.
func (b *baseChain) isBehindNAT() bool { return !b.isNAT && b.priority > prioritySourceNAT }

// mayBeBehindNAT reports whether they may: the order of one priority is not known.
func (b *baseChain) mayBeBehindNAT() bool { return !b.isNAT && b.priority >= prioritySourceNAT }

// prioritySourceNAT is NF_IP_PRI_NAT_SRC.
const prioritySourceNAT = 100

// table is a table of nf_tables or of iptables-legacy, as far as it was read.
type table struct {
	place    Place // without a chain
	chains   map[string]*chain
	sets     map[string]*set
	hasOwned bool // one of the chains is owned
}

type chain struct {
	place Place
	owned bool // its rules are not judged here
	rules []*Rule
}

// reader reads what a table has.
type reader interface {
	rules(chain string) ([]nfnetlink.Rule, error)
	contents(set string) (nfnetlink.Contents, error)
}

// tableReader is a table of nf_tables.
type tableReader struct {
	conn   *nfnetlink.Conn
	family nfnetlink.Family
	name   string
}

func (s tableReader) rules(chain string) ([]nfnetlink.Rule, error) {
	return s.conn.Rules(s.family, s.name, chain)
}

func (s tableReader) contents(set string) (nfnetlink.Contents, error) {
	return s.conn.Contents(s.family, s.name, set)
}

// legacyReader is the chains of a table of iptables-legacy.
type legacyReader map[string]iptables.LegacyChain

func (s legacyReader) rules(chain string) ([]nfnetlink.Rule, error) { return s[chain].Rules, nil }

func (s legacyReader) contents(string) (nfnetlink.Contents, error) {
	return nfnetlink.Contents{}, errors.New("iptables-legacy has no sets")
}

// ReadPostrouting reads what decides about the source addresses of packets that leave: the NAT chains, and
// the chains before and behind them, which may set the mark or write addresses. isOwned tells which chains
// are owned: their rules are not read. It reads the network namespace of the calling thread, with an error
// unless all of nf_tables is of one generation. With an error, the ruleset has what could be read.
func ReadPostrouting(f policy.Family, isOwned func(Place) bool) (*Ruleset, error) {
	has := func(b *nfnetlink.Base) bool {
		return b.Hook == unix.NF_INET_POST_ROUTING
	}
	const priorityMangle = -150 // NF_IP_PRI_MANGLE
	legacy := []legacyBase{
		{"mangle", "POSTROUTING", priorityMangle},
		{iptables.Table, "POSTROUTING", prioritySourceNAT},
	}
	return read(f, has, legacy, isOwned)
}

// ReadBeforeConntrack reads the chains that decide whether packets that come in are tracked. Errors are those
// of ReadPostrouting.
func ReadBeforeConntrack(f policy.Family) (*Ruleset, error) {
	const priorityRaw, priorityConntrack = -300, -200 // NF_IP_PRI_RAW, NF_IP_PRI_CONNTRACK
	has := func(b *nfnetlink.Base) bool {
		return b.Hook == unix.NF_INET_PRE_ROUTING && b.Type != "nat" && b.Priority < priorityConntrack
	}
	noneOwned := func(Place) bool { return false }
	return read(f, has, []legacyBase{{"raw", "PREROUTING", priorityRaw}}, noneOwned)
}

// legacyBase is a base chain of iptables-legacy.
type legacyBase struct {
	table, chain string
	priority     int32
}

// read reads the base chains for which has is true.
func read(
	f policy.Family, has func(*nfnetlink.Base) bool, legacy []legacyBase, isOwned func(Place) bool,
) (*Ruleset, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	inLegacy, errLegacy := readLegacy(f, legacy, isOwned)
	var inTables []*baseChain
	errTables := withConn(func(c *nfnetlink.Conn) error {
		readAll := func() ([]*baseChain, error) { return readTables(c, f, has, isOwned) }
		found, generation, err := nfnetlink.ConsistentRead(c, readAll, nil)
		inTables = found
		if err == nil && generation == 0 {
			err = errTorn
		}
		return err
	})
	r := &Ruleset{family: f, hooks: slices.Concat(inLegacy, inTables)}
	slices.SortStableFunc(r.hooks, (*baseChain).compare)
	return r, errors.Join(errLegacy, errTables)
}

// errTorn tells that other programs changed the ruleset whenever it was read.
var errTorn = errors.New("the ruleset of nf_tables changed during each reading, so rules can be missing")

// withConn runs the function with a connection to nf_tables, if the kernel has nf_tables.
func withConn(body func(*nfnetlink.Conn) error) error {
	var c nfnetlink.Conn
	err := errors.Join(body(&c), c.Close())
	if nfnetlink.Unsupported(err) {
		return nil
	}
	return err
}

func readLegacy(
	f policy.Family, bases []legacyBase, isOwned func(Place) bool,
) (found []*baseChain, err error) {
	for _, b := range bases {
		chains, failed := iptables.Legacy(f, b.table)
		err = errors.Join(err, failed)
		if len(chains) == 0 {
			continue
		}
		place := Place{Backend: policy.IPTables, Variant: netfilter.VariantLegacy, Family: f, Table: b.table}
		t := newTable(place)
		if failed := t.read(legacyReader(chains), b.chain, isOwned); failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		isNAT := b.table == iptables.Table
		found = append(found, t.baseChain(b.chain, isNAT, b.priority, chains[b.chain].Drops))
	}
	return found, err
}

// readTables reads the base chains for which has is true, of a family and of inet, whose tables have both. A
// table that cannot be read is missing, and the error says so.
func readTables(
	conn *nfnetlink.Conn, f policy.Family, has func(*nfnetlink.Base) bool, isOwned func(Place) bool,
) (found []*baseChain, err error) {
	for _, link := range []nfnetlink.Family{netfilter.LinkOf(f), nfnetlink.Inet} {
		chains, failed := readTablesOf(conn, f, link, has, isOwned)
		found = append(found, chains...)
		err = errors.Join(err, failed)
	}
	return found, err
}

func readTablesOf(
	conn *nfnetlink.Conn, f policy.Family, link nfnetlink.Family,
	has func(*nfnetlink.Base) bool, isOwned func(Place) bool,
) (found []*baseChain, err error) {
	tables, errTables := conn.Tables(link)
	chains, errChains := conn.Chains(link, "")
	err = errors.Join(errTables, errChains)
	if nfnetlink.Unsupported(err) { // which would hide what failed in the other family
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	known := map[string]*table{}
	for _, t := range tables {
		if !t.Dormant() {
			known[t.Name] = newTable(placeOf(f, link, t.Name))
		}
	}
	// Of one priority, the kernel calls first what was registered last.
	for _, c := range slices.Backward(chains) {
		t := known[c.Table]
		if t == nil || c.Base == nil || !has(c.Base) {
			continue
		}
		failed := t.read(tableReader{conn, link, c.Table}, c.Name, isOwned)
		if failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		isNAT, drops := c.Base.Type == "nat", c.Base.Policy == nfnetlink.Drop
		found = append(found, t.baseChain(c.Name, isNAT, c.Base.Priority, drops))
	}
	return found, err
}

// placeOf returns the place of a table: those that iptables-nft reads have its names.
func placeOf(f policy.Family, link nfnetlink.Family, name string) Place {
	names := []string{"nat", "mangle", "raw", "filter", "security"}
	if link != nfnetlink.Inet && slices.Contains(names, name) {
		return Place{Backend: policy.IPTables, Variant: netfilter.VariantNFT, Family: f, Table: name}
	}
	return Place{Backend: policy.NFTables, Family: f, Table: name}
}

// baseChain returns a chain that was read as a base chain.
func (t *table) baseChain(name string, isNAT bool, priority int32, drops bool) *baseChain {
	b := &baseChain{table: t, name: name, isNAT: isNAT, priority: priority}
	if drops {
		b.drop = &Rule{Place: t.chains[name].place, table: t}
	}
	return b
}

func newTable(place Place) *table {
	return &table{place: place, chains: map[string]*chain{}, sets: map[string]*set{}}
}

// read reads a chain that was not read yet, and all that it leads to. The rules of owned chains are not kept.
// Most of these are known by their names, and are not read. Others are known by the owner that a comment of
// one of their rules names.
func (t *table) read(from reader, name string, isOwned func(Place) bool) error {
	if t.chains[name] != nil {
		return nil
	}
	c := &chain{place: t.place}
	c.place.Chain = name
	t.chains[name] = c
	c.owned = isOwned(c.place)
	if !c.owned {
		err := t.readRules(from, c)
		if err != nil {
			return err
		}
		c.owned = isOwned(c.place)
	}
	if c.owned {
		t.hasOwned = true
		c.rules = nil
		return nil
	}
	for _, r := range c.rules {
		for _, target := range t.targets(from, r) {
			err := t.read(from, target, isOwned)
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// readRules reads the rules of a chain, and its owner.
func (t *table) readRules(from reader, c *chain) error {
	rules, err := from.rules(c.place.Chain)
	if err != nil {
		return fmt.Errorf("read the rules of table %s (%s): %w", plain(t.place.Table), t.place.Family, err)
	}
	for _, r := range rules {
		rule := &Rule{Place: c.place, Comment: commentOf(r), Exprs: r.Exprs, table: t}
		c.rules = append(c.rules, rule)
		if c.place.Owner == (policy.Owner{}) {
			c.place.Owner = policy.ParseOwner(rule.Comment)
		}
	}
	return nil
}

// commentOf returns the comment of a rule, which is a match in one of iptables.
func commentOf(r nfnetlink.Rule) string {
	for _, e := range r.Exprs {
		if m, is := e.(nfnetlink.Match); is && m.Xt == "comment" {
			text, _, _ := bytes.Cut(m.Info, []byte{0})
			return string(text)
		}
	}
	return r.Comment
}

// targets reads the sets that a rule uses, and returns the chains to which it leads.
func (t *table) targets(from reader, r *Rule) []string {
	targets := map[string]bool{}
	for _, e := range r.Exprs {
		switch e := e.(type) {
		case nfnetlink.Verdict:
			targets[e.Chain] = true
		case nfnetlink.Lookup:
			t.readSet(from, e.Set)
		case nfnetlink.MapLookup:
			for _, element := range t.readSet(from, e.Set).Elements {
				if element.Verdict != nil {
					targets[element.Verdict.Chain] = true
				}
			}
		}
	}
	delete(targets, "")
	return slices.Sorted(maps.Keys(targets))
}

// readSet reads a set once. One that cannot be read has any element.
func (t *table) readSet(from reader, name string) *set {
	s := t.sets[name]
	if s == nil {
		contents, err := from.contents(name)
		s = newSet(contents)
		s.unreadable = s.unreadable || err != nil
		t.sets[name] = s
	}
	return s
}
