// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

type backend struct{ driver *Driver }

func (b *backend) Layout() policy.Layout { return policy.Layout{Sets: true} }

func (b *backend) OwnsTables() bool { return true }

// state is a reading of the owned tables of one name. It is the State of an observation.
type state struct {
	tables     map[policy.Family]*table
	generation uint32 // 0 if the reading is not of one generation
}

func (d *Driver) read(name string) (*state, error) {
	return d.readEach(func(f policy.Family) (*table, error) { return readTable(&d.conn, f, name) })
}

func (d *Driver) readEach(readFamily func(policy.Family) (*table, error)) (*state, error) {
	s, generation, err := nfnetlink.ConsistentRead(&d.conn, func() (*state, error) {
		s := &state{tables: map[policy.Family]*table{}}
		for _, f := range policy.Families() {
			t, err := readFamily(f)
			if err != nil {
				return nil, err
			}
			s.tables[f] = t
		}
		return s, nil
	}, (*state).sameRules)
	if nfnetlink.Unsupported(err) {
		err = usable(err)
	}
	if err != nil {
		return nil, err
	}
	s.generation = generation
	return s, nil
}

// sameRules reports whether all tables have the same rules as those that were read later.
func (s *state) sameRules(later *state) bool {
	return maps.EqualFunc(s.tables, later.tables, (*table).sameRules)
}

// Observe implements netfilter.Backend.
func (b *backend) Observe(context.Context, []policy.ChainFamily) (netfilter.Observation, error) {
	s, err := b.driver.read(tableName)
	if err != nil {
		return netfilter.Observation{}, err
	}
	o := netfilter.Observation{Generation: s.generation, State: s}
	for _, f := range policy.Families() {
		t := s.tables[f].ruleset(f)
		o.Rules.Chains = append(o.Rules.Chains, t.Chains...)
		o.Rules.Unrecognized = append(o.Rules.Unrecognized, t.Unrecognized...)
	}
	return o, nil
}

// Apply implements netfilter.Backend. It recreates a table that the kernel refuses to change, because
// what is wrong with the existing one may not be visible.
func (b *backend) Apply(_ context.Context, desired policy.Ruleset, from netfilter.Observation, _ *os.File) error {
	return b.write(from.State, false, toDesired(desired))
}

// toDesired returns the change after which the tables have exactly the desired chains.
func toDesired(desired policy.Ruleset) func(*tableWriter) {
	return func(w *tableWriter) { w.update(masqTable(w.family, netfilter.ChainsOf(desired, w.family), w.have)) }
}

// Remove implements netfilter.Backend. It leaves everything else in the tables, except sets that no
// rule uses, and deletes a table without a masquerade chain.
func (b *backend) Remove(_ context.Context, chains []policy.ChainFamily, _ *os.File) error {
	return b.write(nil, false, func(w *tableWriter) {
		w.remove(func(name string) bool {
			return slices.Contains(chains, policy.ChainFamily{Chain: name, Family: w.family})
		})
	})
}

// CanWrite implements netfilter.Backend: a program can make itself the owner of a table.
func (b *backend) CanWrite(_ context.Context, f policy.Family) error {
	return b.driver.checkOwner(netfilter.LinkOf(f), tableName)
}

func (d *Driver) checkOwner(f nfnetlink.Family, table string) error {
	t, err := d.conn.Table(f, table)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return usable(err)
	}
	if err = netfilter.CheckTableOwner(f, t); err != nil {
		err = fmt.Errorf("nftables: %w", err)
	}
	return err
}

func (b *backend) CheckWrite(_ context.Context, desired policy.Ruleset, from netfilter.Observation) error {
	return b.write(from.State, true, toDesired(desired))
}

// write changes the tables with masquerade chains, or asks whether the kernel accepts that.
func (b *backend) write(observed any, dryRun bool, change func(*tableWriter)) error {
	left, err := b.driver.write(observed, tableName, dryRun, change)
	if left {
		_ = b.Remove(context.Background(), nil, nil)
	}
	return lacking(err, "CONFIG_NFT_NAT, CONFIG_NFT_MASQ, CONFIG_NFT_FIB_IPV4 and CONFIG_NFT_FIB_IPV6",
		"nft_chain_nat nft_masq nft_fib_ipv4 nft_fib_ipv6 nft_nat", ", or set backend to iptables")
}

type writer struct {
	*Driver
	name       string
	dryRun     bool // ask the kernel, and commit nothing
	change     func(*tableWriter)
	before     *state                    // that was observed, nil if none
	broken     map[nfnetlink.Family]bool // the tables that the kernel refused to change
	encoded    *state                    // that the batches were encoded for
	fill, rest *nfnetlink.Batch
	left       bool // new sets of a first batch are in the kernel
}

// write changes tables. If another program commits meanwhile, it reads them again and continues,
// unless the rules are no longer the observed ones, if any. A table that the kernel refuses to
// change counts as broken then. It reports whether it failed and left new sets of a first batch.
func (d *Driver) write(observed any, name string, dryRun bool, change func(*tableWriter)) (left bool, err error) {
	const attempts = 10
	w := writer{Driver: d, name: name, dryRun: dryRun, change: change, broken: map[nfnetlink.Family]bool{}}
	w.before, _ = observed.(*state)
	now := w.before
	for attempt := 1; ; attempt++ {
		err := w.try(now)
		stale := errors.Is(err, nfnetlink.ErrStale)
		switch refused, _ := errors.AsType[*nfnetlink.Error](err); {
		case err == nil:
			return false, nil
		case stale && attempt < attempts:
		case stale:
			return w.left, fmt.Errorf("%w: %w", netfilter.ErrChanged, err)
		case refused == nil || refused.Family == 0:
			return w.left, err
		case errors.Is(err, os.ErrPermission): // the kernel has one number for all that it forbids
			for _, f := range policy.Families() {
				err = cmp.Or(d.checkOwner(netfilter.LinkOf(f), name), err)
			}
			return w.left, err
		case !w.broken[refused.Family]:
			w.broken[refused.Family] = true
		default:
			return w.left, err
		}
		now = nil
	}
}

// try reads the tables, unless they are given, and sends the changes.
func (w *writer) try(now *state) (err error) {
	if now == nil {
		if now, err = w.read(w.name); err != nil {
			return err
		}
		if w.before != nil && !w.before.sameRules(now) {
			return netfilter.ErrChanged
		}
	}
	for f, t := range now.tables {
		t.broken = t.broken || t.exists && w.broken[netfilter.LinkOf(f)]
	}
	// To encode many prefixes takes longer than other programs may pause.
	if w.encoded == nil || !maps.EqualFunc(w.encoded.tables, now.tables, func(a, b *table) bool {
		return a.exists == b.exists && a.broken == b.broken && a.sameRules(b)
	}) {
		w.encode(now)
	}
	w.fill.Generation, w.rest.Generation = now.generation, now.generation
	if w.dryRun {
		return w.conn.Check(w.rest)
	}
	if w.fill.Len() > 0 {
		if err := w.conn.Commit(w.fill); err != nil {
			return err
		}
		w.left = true
		if now.generation != 0 {
			w.rest.Generation = max(now.generation+1, 1) // the kernel leaves 0 out
		}
	}
	return w.conn.Commit(w.rest)
}

// encode encodes the changes of all tables in two batches: the first one creates and fills new sets, the
// second one does the rest, because packets can meet a set empty that is created in the batch of the rules
// that use it.
func (w *writer) encode(s *state) {
	w.fill, w.rest, w.encoded = &nfnetlink.Batch{}, &nfnetlink.Batch{}, s
	if w.dryRun {
		w.fill = w.rest
	}
	for _, f := range policy.Families() {
		w.change(&tableWriter{netfilter.LinkOf(f), f, s.tables[f], w.fill, w.rest})
	}
}

type tableWriter struct {
	link       nfnetlink.Family
	family     policy.Family
	have       *table
	fill, rest *nfnetlink.Batch
}

// update writes the smallest change after which the table is as desired. nil is none.
func (w *tableWriter) update(want *table) {
	have, table := w.have, w.have.name
	if want == nil && have.exists {
		w.rest.DeleteTable(w.link, table)
	}
	if want == nil {
		return
	}
	for name := range want.sets {
		held, exists := have.sets[name]
		have.broken = have.broken || exists && held == nil // a set of another form: two of one name cannot exist
	}
	fill := w.fill
	if have.broken { // one batch, because no packet may find no table, or one without its sets
		w.rest.DeleteTable(w.link, table)
		have, fill = newTable(table), w.rest
	}
	if !have.exists {
		fill.AddTable(w.link, table)
	}
	for _, name := range want.order {
		if c := want.chains[name]; c == nil {
			w.updateSet(name, want, have, fill)
		} else if have.chains[name] == nil {
			w.rest.AddChain(w.link, table, name, c.base)
		}
	}
	for _, name := range sorted(want.chains, nil) {
		if c, held := want.chains[name], have.chains[name]; held == nil || c.differs(held) {
			w.rest.FlushChain(w.link, table, name)
			for _, r := range c.rules {
				w.rest.AddRule(w.link, table, name, r.exprs, r.comment)
			}
		}
	}
	w.deleteChains(slices.DeleteFunc(sorted(have.chains, nil), func(name string) bool { return want.chains[name] != nil }))
	w.deleteSets(have, func(name string) bool {
		_, wanted := want.sets[name]
		return !wanted
	})
}

// updateSet changes the elements of a set. A new one is created and filled in the batch fill.
func (w *tableWriter) updateSet(name string, want, have *table, fill *nfnetlink.Batch) {
	batch := w.rest
	ranges, held := want.sets[name], have.sets[name]
	if _, exists := have.sets[name]; !exists {
		batch = fill
		batch.AddSet(w.link, have.name, setForm(w.link, name))
	}
	batch.DeleteElements(w.link, have.name, name, held.Minus(ranges))
	batch.AddElements(w.link, have.name, name, ranges.Minus(held))
}

// remove deletes masquerade chains and the unused sets that a writer left that was killed between its two
// batches.
func (w *tableWriter) remove(gone func(masqChain string) bool) {
	var chains []string
	stay := maps.Clone(w.have.chains)
	others := 0 // masquerade chains
	for name := range w.have.chains {
		switch masqChain, isMasq := masqChainOf(name); {
		case isMasq && gone(masqChain):
			chains = append(chains, name)
			delete(stay, name)
		case isMasq:
			others++
		}
	}
	if others == 0 && (len(chains) > 0 || w.have.leftover()) {
		w.rest.DeleteTable(w.link, tableName)
		return
	}
	if base := stay[baseChain]; base != nil {
		stay[baseChain] = &chain{rules: slices.DeleteFunc(slices.Clone(base.rules), func(r rule) bool {
			goes := slices.Contains(chains, r.target())
			if goes {
				w.rest.DeleteRule(w.link, tableName, baseChain, r.handle)
			}
			return goes
		})}
	}
	used := usedSets(stay)
	w.deleteChains(chains)
	w.deleteSets(w.have, func(name string) bool { return !used[name] && ownSet(name) })
}

// leftover reports whether the table has at most the sets of a writer killed between its batches.
func (t *table) leftover() bool {
	base := t.chains[baseChain]
	others := slices.ContainsFunc(sorted(t.sets, nil), func(name string) bool { return !ownSet(name) })
	return t.exists && !t.broken && !others && (len(t.chains) == 0 || len(t.chains) == 1 && base != nil && len(base.rules) == 0)
}

// deleteChains deletes chains, which may jump to each other.
func (w *tableWriter) deleteChains(names []string) {
	slices.Sort(names)
	for _, name := range names {
		w.rest.FlushChain(w.link, w.have.name, name)
	}
	for _, name := range names {
		w.rest.DeleteChain(w.link, w.have.name, name)
	}
}

func (w *tableWriter) deleteSets(of *table, match func(name string) bool) {
	for _, name := range sorted(of.sets, nil) {
		if match(name) {
			w.rest.DeleteSet(w.link, of.name, name)
		}
	}
}

// sorted returns the names that one of the maps has.
func sorted[T any](a, b map[string]T) []string {
	names := slices.AppendSeq(slices.Sorted(maps.Keys(a)), maps.Keys(b))
	slices.Sort(names)
	return slices.Compact(names)
}
