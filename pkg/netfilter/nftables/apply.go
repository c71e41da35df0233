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

// Layout implements netfilter.Backend.
func (b *backend) Layout() policy.Layout { return policy.Layout{Sets: true} }

// OwnsTables implements netfilter.Backend.
func (b *backend) OwnsTables() bool { return true }

// state is a reading of the owned tables of one name. It is the State of an observation.
type state struct {
	tables     map[policy.Family]*table
	generation uint32 // 0 if the reading is not of one generation
}

// tablesReader reads the tables of one name.
type tablesReader func(*nfnetlink.Conn, policy.Family) (*table, error)

func readMasqTable(conn *nfnetlink.Conn, f policy.Family) (*table, error) {
	return readTable(conn, f, tableName)
}

// read reads the tables of all families.
func (d *Driver) read(readFamily tablesReader) (*state, error) {
	conn, err := d.dial()
	if err != nil {
		return nil, err
	}
	var s, last *state
	generation, err := conn.ConsistentRead(func() (err error) {
		s = &state{tables: map[policy.Family]*table{}}
		for _, f := range policy.Families() {
			if s.tables[f], err = readFamily(conn, f); err != nil {
				return err
			}
		}
		return nil
	}, func() (same bool) {
		same = last != nil && last.same(s, (*table).sameRules)
		last = s
		return same
	})
	switch {
	case nfnetlink.Unsupported(err):
		return nil, usable(err)
	case err != nil:
		return nil, err // s is nil if nothing was read, as without CAP_NET_ADMIN
	}
	s.generation = generation
	return s, nil
}

// same reports whether all tables are the same as those that were read later.
func (s *state) same(later *state, same func(t, later *table) bool) bool {
	return maps.EqualFunc(s.tables, later.tables, same)
}

// Observe implements netfilter.Backend. It reads all chains of the tables.
func (b *backend) Observe(context.Context, []policy.ChainFamily) (netfilter.Observation, error) {
	s, err := b.driver.read(readMasqTable)
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
	return b.write(from.State, commit, toDesired(desired))
}

// toDesired returns the change after which the tables have exactly the desired chains.
func toDesired(desired policy.Ruleset) func(*tableWriter) {
	return func(w *tableWriter) { w.update(masqTable(w.family, chainsOf(desired, w.family), w.have)) }
}

// Remove implements netfilter.Backend. It leaves everything else in the tables, except sets that no
// rule uses, and deletes a table without a masquerade chain.
func (b *backend) Remove(_ context.Context, chains []policy.ChainFamily, _ *os.File) error {
	return b.write(nil, commit, func(w *tableWriter) {
		w.remove(func(name string) bool {
			return slices.Contains(chains, policy.ChainFamily{Chain: name, Family: w.family})
		})
	})
}

// CanWrite implements netfilter.Backend: a program can make itself the owner of a table.
func (b *backend) CanWrite(_ context.Context, f policy.Family) error {
	conn, err := b.driver.dial()
	if err == nil {
		err = checkOwner(conn, headerOf(f).link, tableName)
	}
	return err
}

func checkOwner(conn *nfnetlink.Conn, f nfnetlink.Family, table string) error {
	t, err := conn.Table(f, table)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return usable(err)
	}
	if err = netfilter.CheckTableOwner(f, t); err != nil {
		err = fmt.Errorf("nftables: %w", err)
	}
	return err
}

// CheckWrite implements netfilter.Backend.
func (b *backend) CheckWrite(_ context.Context, desired policy.Ruleset, from netfilter.Observation) error {
	return b.write(from.State, check, toDesired(desired))
}

// write changes the tables with masquerade chains.
func (b *backend) write(observed any, send sender, change func(*tableWriter)) error {
	left, err := b.driver.write(observed, readMasqTable, send, change)
	if left {
		_ = b.Remove(context.Background(), nil, nil)
	}
	return withModules(err)
}

func withModules(err error) error {
	return lacking(err, "CONFIG_NFT_NAT, CONFIG_NFT_MASQ, CONFIG_NFT_FIB_IPV4 and CONFIG_NFT_FIB_IPV6",
		"nft_chain_nat nft_masq nft_fib_ipv4 nft_fib_ipv6 nft_nat", ", or set backend to iptables")
}

// write changes tables. If another program commits meanwhile, it reads them again and continues, unless
// a state was observed and the rules are no longer those of it. A table that the kernel refuses to change
// counts as broken from then on. It reports whether it failed and left new sets of a first batch. Observed is the
// State of an observation.
func (d *Driver) write(observed any, read tablesReader, send sender, change func(*tableWriter)) (left bool, err error) {
	const attempts = 10
	conn, err := d.dial()
	if err != nil {
		return false, err
	}
	broken := map[nfnetlink.Family]bool{}
	var fill, rest *nfnetlink.Batch
	var encoded *state // that the batches were encoded for
	before, _ := observed.(*state)
	for now, attempt := before, 1; ; attempt++ {
		if now == nil {
			if now, err = d.read(read); err == nil && before != nil && !before.same(now, (*table).sameRules) {
				err = netfilter.ErrChanged
			}
		}
		if err == nil {
			for f, t := range now.tables {
				t.broken = t.broken || t.exists && broken[headerOf(f).link]
			}
			// To encode many prefixes takes longer than other programs may pause.
			if encoded == nil || !encoded.same(now, (*table).sameObjects) {
				fill, rest = now.batches(change)
				encoded = now
			}
			fill.Generation, rest.Generation = now.generation, now.generation
			var filled bool
			filled, err = send(now, conn, fill, rest)
			left = left || filled
		}
		refused, _ := errors.AsType[*nfnetlink.Error](err)
		switch {
		case err == nil:
			return false, nil
		case errors.Is(err, nfnetlink.ErrStale) && attempt < attempts:
		case refused != nil && refused.Family != 0 && !broken[refused.Family] && !errors.Is(err, os.ErrPermission):
			broken[refused.Family] = true
		default:
			if errors.Is(err, nfnetlink.ErrStale) {
				err = fmt.Errorf("%w: %w", netfilter.ErrChanged, err)
			}
			return left, now.ownerOr(conn, err)
		}
		now, err = nil, nil
	}
}

// ownerOr returns which table belongs to another program if the kernel forbids an operation, else its error: it has one
// number for all that it forbids.
func (s *state) ownerOr(conn *nfnetlink.Conn, err error) error {
	if refused, _ := errors.AsType[*nfnetlink.Error](err); refused != nil && refused.Family != 0 && errors.Is(err, os.ErrPermission) {
		for f, t := range s.tables {
			err = cmp.Or(checkOwner(conn, headerOf(f).link, t.name), err)
		}
	}
	return err
}

// sender sends the changes of all tables and reports whether new sets were created.
type sender func(s *state, conn *nfnetlink.Conn, fill, rest *nfnetlink.Batch) (filled bool, err error)

// check sends the changes as one batch that is not committed.
func check(_ *state, conn *nfnetlink.Conn, fill, rest *nfnetlink.Batch) (filled bool, err error) {
	all := &nfnetlink.Batch{Generation: rest.Generation}
	all.Append(fill)
	all.Append(rest)
	return false, conn.Check(all)
}

// commit sends the changes in two batches: the first one creates and fills new sets, the second one does the
// rest, because packets can meet a set empty that is created in the batch of the rules that use it.
func commit(s *state, conn *nfnetlink.Conn, fill, rest *nfnetlink.Batch) (filled bool, err error) {
	if fill.Len() > 0 {
		if err := conn.Commit(fill); err != nil {
			return false, err
		}
		if s.generation != 0 {
			s.generation = max(s.generation+1, 1) // the kernel leaves 0 out
		}
		rest.Generation = s.generation
	}
	return fill.Len() > 0, conn.Commit(rest)
}

func (s *state) batches(change func(*tableWriter)) (fill, rest *nfnetlink.Batch) {
	fill, rest = &nfnetlink.Batch{}, &nfnetlink.Batch{}
	for _, f := range policy.Families() {
		change(&tableWriter{headerOf(f), f, s.tables[f], fill, rest})
	}
	return fill, rest
}

// tableWriter writes the changes of a table.
type tableWriter struct {
	header
	family     policy.Family
	have       *table
	fill, rest *nfnetlink.Batch
}

// update writes the smallest change after which the table is as desired. nil is none.
func (w *tableWriter) update(want *table) {
	have, table := w.have, w.have.name
	if want == nil {
		if have.exists {
			w.rest.DeleteTable(w.link, table)
		}
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
		ranges, isSet := want.sets[name]
		held, exists := have.sets[name]
		batch := w.rest
		switch {
		case !isSet && have.chains[name] == nil:
			w.rest.AddChain(w.link, table, name, want.chains[name].base)
		case isSet && !exists:
			batch = fill
			batch.AddSet(w.link, table, w.setForm(name))
		}
		batch.DeleteElements(w.link, table, name, held.Minus(ranges))
		batch.AddElements(w.link, table, name, ranges.Minus(held))
	}
	for _, name := range sorted(want.chains, nil) {
		c, held := want.chains[name], have.chains[name]
		if held != nil && !c.differs(held) {
			continue
		}
		if held != nil {
			w.rest.FlushChain(w.link, table, name)
		}
		for _, r := range c.rules {
			w.rest.AddRule(w.link, table, name, r.exprs, r.comment)
		}
	}
	w.deleteChains(slices.DeleteFunc(sorted(have.chains, nil), func(name string) bool { return want.chains[name] != nil }))
	w.deleteSets(have, func(name string) bool {
		_, wanted := want.sets[name]
		return !wanted
	})
}

// remove deletes masquerade chains and the unused sets that a writer left that was killed between its two batches.
func (w *tableWriter) remove(gone func(masqChain string) bool) {
	var chains []string
	stay := map[string]*chain{}
	masqChains := 0
	for name, c := range w.have.chains {
		masqChain, masq := masqChainOf(name)
		if masq {
			masqChains++
		}
		if masq && gone(masqChain) {
			chains = append(chains, name)
		} else {
			stay[name] = c
		}
	}
	if len(chains) == masqChains && (len(chains) > 0 || w.have.leftover()) {
		w.rest.DeleteTable(w.link, tableName)
		return
	}
	if base := stay[baseChain]; base != nil {
		stay[baseChain] = &chain{rules: slices.DeleteFunc(slices.Clone(base.rules), func(r rule) bool {
			masqChain, masq := masqChainOf(r.target())
			goes := masq && gone(masqChain)
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

// leftover reports whether the table has at most the sets of a writer that was killed between its two
// batches.
func (t *table) leftover() bool {
	for name := range t.sets {
		if !ownSet(name) {
			return false
		}
	}
	base := t.chains[baseChain]
	return t.exists && !t.broken && (len(t.chains) == 0 || len(t.chains) == 1 && base != nil && len(base.rules) == 0)
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

// deleteSets deletes the sets of a table whose names match.
func (w *tableWriter) deleteSets(of *table, match func(name string) bool) {
	for _, name := range sorted(of.sets, nil) {
		if match(name) {
			w.rest.DeleteSet(w.link, of.name, name)
		}
	}
}

// sorted returns the names that one of the maps has.
func sorted[T any](a, b map[string]T) []string {
	names := maps.Clone(b)
	if names == nil {
		names = map[string]T{}
	}
	maps.Copy(names, a)
	return slices.Sorted(maps.Keys(names))
}
