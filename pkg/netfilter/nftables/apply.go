// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
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

// state is a reading of owned tables, either those with masquerade chains or those with guards. It is the
// State of an observation.
type state struct {
	tables     map[policy.Family]*table
	guards     map[policy.Family]*guardTable
	generation uint32 // 0 if the reading is not of one generation
}

func (b *backend) read() (*state, error) {
	return b.driver.read(func(conn *nfnetlink.Conn, s *state, f policy.Family) (err error) {
		s.tables[f], err = readTable(conn, f)
		return err
	})
}

// read reads the tables of all families with readFamily.
func (d *Driver) read(readFamily func(*nfnetlink.Conn, *state, policy.Family) error) (*state, error) {
	conn, err := d.dial()
	if err != nil {
		return nil, err
	}
	var s, last *state
	generation, err := conn.ConsistentRead(func() (err error) {
		s = &state{tables: map[policy.Family]*table{}, guards: map[policy.Family]*guardTable{}}
		for _, f := range policy.Families() {
			if err := readFamily(conn, s, f); err != nil {
				return err
			}
		}
		return nil
	}, func() (same bool) {
		same = last != nil && last.sameRules(s) && reflect.DeepEqual(last.ruleset().Unrecognized, s.ruleset().Unrecognized)
		last = s
		return same
	})
	if err != nil {
		return nil, err // s is nil if nothing was read, as without CAP_NET_ADMIN
	}
	s.generation = generation
	return s, nil
}

// Observe implements netfilter.Backend. It reads all chains of the tables.
func (b *backend) Observe(context.Context, []policy.ChainFamily) (netfilter.Observation, error) {
	s, err := b.read()
	if err != nil {
		return netfilter.Observation{}, err
	}
	return netfilter.Observation{Rules: s.ruleset(), Generation: s.generation, State: s}, nil
}

func (s *state) ruleset() (rs policy.Ruleset) {
	for _, f := range policy.Families() {
		if s.tables[f] == nil {
			continue
		}
		t := s.tables[f].ruleset(f)
		rs.Chains = append(rs.Chains, t.Chains...)
		rs.Unrecognized = append(rs.Unrecognized, t.Unrecognized...)
	}
	return rs
}

// Apply implements netfilter.Backend. It recreates a table that the kernel refuses to change, because
// what is wrong with the existing one may not be visible.
func (b *backend) Apply(_ context.Context, desired policy.Ruleset, from netfilter.Observation, _ *os.File) error {
	s, _ := from.State.(*state)
	return b.write(s, func(w *tableWriter) { w.update(chainsOf(desired, w.family)) })
}

// Remove implements netfilter.Backend. It leaves everything else in the tables, except sets that no
// rule uses, and deletes a table without a masquerade chain.
func (b *backend) Remove(_ context.Context, chains []policy.ChainFamily, _ *os.File) error {
	return b.write(nil, func(w *tableWriter) {
		w.remove(func(name string) bool {
			return slices.Contains(chains, policy.ChainFamily{Chain: name, Family: w.family})
		})
	})
}

// CanWrite implements netfilter.Backend: a program can make itself the owner of a table.
func (b *backend) CanWrite(_ context.Context, f policy.Family) error {
	conn, err := b.driver.dial()
	if err != nil {
		return err
	}
	t, err := conn.Table(headerOf(f).link, tableName)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return usable(err)
	}
	if t.Owner != 0 {
		return fmt.Errorf("nftables: %w: table %s %s is owned by another program (flags owner, netlink port %d, "+
			"which is often its pid), which alone may change it as long as it runs; end it",
			netfilter.ErrUnusable, headerOf(f).link, tableName, t.Owner)
	}
	return nil
}

// CheckWrite implements netfilter.Backend. Of tables that do not exist it asks the kernel for what each
// policy needs.
func (b *backend) CheckWrite(_ context.Context, desired policy.Ruleset) error {
	conn, err := b.driver.dial()
	if err != nil {
		return err
	}
	base, batch := baseHook(), &nfnetlink.Batch{}
	const chain = chainPrefix + "check"
	for _, f := range policy.Families() {
		h := headerOf(f)
		if _, err := conn.Table(h.link, tableName); len(chainsOf(desired, f)) == 0 || !errors.Is(err, os.ErrNotExist) {
			continue
		}
		batch.AddTable(h.link, tableName)
		batch.AddChain(h.link, tableName, baseChain, &base)
		batch.AddChain(h.link, tableName, chain, nil)
		batch.AddRule(h.link, tableName, chain, encode(f, policy.Rule{Verdict: policy.Masquerade}, "", ""), "")
		for _, c := range chainsOf(desired, f) {
			if i := slices.IndexFunc(c.Rules, func(r policy.Rule) bool { return r.Address.IsValid() }); i >= 0 {
				snat := policy.Rule{Verdict: policy.Masquerade, Address: c.Rules[i].Address}
				batch.AddRule(h.link, tableName, chain, encode(f, snat, "", ""), "")
			}
		}
		jump := policy.Rule{Match: policy.Match{NotToLocal: true}, Verdict: policy.Jump}
		batch.AddRule(h.link, tableName, baseChain, encode(f, jump, "", chain), "")
	}
	return withModule(conn.Check(batch))
}

// write changes the tables with masquerade chains.
func (b *backend) write(observed *state, change func(*tableWriter)) error {
	left, err := b.driver.write(observed, b.read,
		func(s *state) (fill, rest *nfnetlink.Batch) { return s.batches(change) })
	if left {
		_ = b.Remove(context.Background(), nil, nil)
	}
	return withModule(err)
}

// write changes tables. If another program commits meanwhile, it reads them again and continues, unless
// a state was observed and the rules are no longer those of it. A table that the kernel refuses to change
// counts as broken from then on. It reports whether it failed and left new sets of a first batch.
func (d *Driver) write(
	observed *state, read func() (*state, error), batches func(*state) (fill, rest *nfnetlink.Batch),
) (left bool, err error) {
	const attempts = 10
	conn, err := d.dial()
	if err != nil {
		return false, err
	}
	broken := map[nfnetlink.Family]bool{}
	var fill, rest *nfnetlink.Batch
	var encoded *state // that the batches were encoded for
	for now, attempt := observed, 1; ; attempt++ {
		if now == nil {
			if now, err = read(); err == nil && observed != nil && !observed.sameRules(now) {
				err = netfilter.ErrChanged
			}
		}
		if err == nil {
			for f, t := range now.tables {
				t.broken = t.broken || t.exists && broken[headerOf(f).link]
			}
			for f, t := range now.guards {
				t.broken = t.broken || t.exists && broken[headerOf(f).link]
			}
			// To encode many prefixes takes longer than other programs may pause.
			if encoded == nil || !encoded.sameObjects(now) {
				fill, rest = batches(now)
				encoded = now
			}
			fill.Generation, rest.Generation = now.generation, now.generation
			var filled bool
			filled, err = now.commit(conn, fill, rest)
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
			return left, err
		}
		now, err = nil, nil
	}
}

// sameRules reports whether the state as it was read later has the same rules.
func (s *state) sameRules(later *state) bool {
	for f, t := range s.tables {
		if !t.sameRules(later.tables[f]) {
			return false
		}
	}
	for f, t := range s.guards {
		if !t.sameRules(later.guards[f]) {
			return false
		}
	}
	return true
}

// sameRules reports whether the table as it was read later has the same rules. It may have new sets.
func (t *table) sameRules(later *table) bool {
	same := func(a, b rule) bool { return a.handle == b.handle && a.SameReading(b.Rule) }
	return slices.EqualFunc(t.jumps, later.jumps, same) && maps.EqualFunc(t.chains, later.chains, func(a, b *chain) bool {
		return a.owner == b.owner && slices.EqualFunc(a.rules, b.rules, same)
	})
}

// sameObjects reports whether both states have the same objects, so that the same batches change them.
func (s *state) sameObjects(t *state) bool {
	return s.sameRules(t) && maps.EqualFunc(s.tables, t.tables, func(a, b *table) bool {
		return a.baseOK == b.baseOK && slices.Equal(a.otherChains, b.otherChains) && reflect.DeepEqual(a.tableObjects, b.tableObjects)
	}) && maps.EqualFunc(s.guards, t.guards, func(a, b *guardTable) bool {
		return reflect.DeepEqual(a.tableObjects, b.tableObjects)
	})
}

// commit sends the changes of all tables in two batches: the first one creates and fills new sets, the
// second one does the rest, because packets can meet a set empty that is created in the batch of the
// rules that use it. It reports whether the first batch was applied.
func (s *state) commit(conn *nfnetlink.Conn, fill, rest *nfnetlink.Batch) (filled bool, err error) {
	if err := conn.Reserve(fill, rest); err != nil { // before the first one is sent
		return false, err
	}
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
		change(newTableWriter(f, s.tables[f], fill, rest))
	}
	return fill, rest
}

// tableWriter writes the changes of a table.
type tableWriter struct {
	header
	family     policy.Family
	have       *table
	fill, rest *nfnetlink.Batch
	setNames
}

func newTableWriter(f policy.Family, have *table, fill, rest *nfnetlink.Batch) *tableWriter {
	w := &tableWriter{header: headerOf(f), family: f, have: have, fill: fill, rest: rest}
	w.setNames = setNames{sets: maps.Clone(have.sets), used: map[string]bool{}, create: w.createSet}
	return w
}

func (w *tableWriter) createSet(name string, ranges policy.Ranges) {
	w.fill.AddSet(w.link, tableName, nfnetlink.AddressRanges(w.link, name))
	w.fill.AddElements(w.link, tableName, name, ranges)
}

// update writes the smallest change after which the table has the desired chains and nothing else.
func (w *tableWriter) update(desired []policy.Chain) {
	switch {
	case len(desired) == 0:
		if w.have.exists {
			w.rest.DeleteTable(w.link, tableName)
		}
		return
	case w.have.broken: // one batch, because without the table every destination is exempt
		w.rest.DeleteTable(w.link, tableName)
		w = newTableWriter(w.family, &table{}, w.rest, w.rest)
	}
	if w.updateElements(desired) {
		return
	}
	if !w.have.exists {
		w.fill.AddTable(w.link, tableName)
	}
	if !w.have.baseOK {
		base := baseHook()
		w.rest.AddChain(w.link, tableName, baseChain, &base)
	}
	jumps := 0
	sameJumps := w.have.baseOK
	for i := range desired {
		w.updateChain(&desired[i])
		sameJumps = sameJumps && slices.EqualFunc(desired[i].Jumps, w.have.jumpsTo(desired[i].Name), equal)
		jumps += len(desired[i].Jumps)
	}
	if sameJumps && jumps == len(w.have.jumps) {
		w.use(w.have.jumps)
	} else {
		w.rewriteJumps(desired)
	}
	var gone []string
	for name := range w.have.chains {
		if !slices.ContainsFunc(desired, func(c policy.Chain) bool { return c.Name == name }) {
			gone = append(gone, chainPrefix+name)
		}
	}
	deleteChains(w.rest, w.link, tableName, append(gone, w.have.otherChains...))
	w.deleteSets(func(name string) bool { return !anonymous(name) })
}

// updateChain writes the rules of a chain if they differ.
func (w *tableWriter) updateChain(want *policy.Chain) {
	name, have := chainPrefix+want.Name, w.have.chains[want.Name]
	if have != nil && !have.owner.Differs(want.Owner) && slices.EqualFunc(want.Rules, have.rules, equal) {
		w.use(have.rules)
		return
	}
	w.rest.AddChain(w.link, tableName, name, nil)
	w.rest.FlushChain(w.link, tableName, name)
	for i, r := range want.Rules {
		exprs := encode(w.family, r, w.setOf(r, want.Name, sourceSet), "")
		w.rest.AddRule(w.link, tableName, name, exprs, commentOn(want, i))
	}
}

func equal(want policy.Rule, have rule) bool { return want.Equal(have.Rule) }

// rewriteJumps writes the rules of the base chain.
func (w *tableWriter) rewriteJumps(desired []policy.Chain) {
	w.rest.FlushChain(w.link, tableName, baseChain)
	for i := range desired {
		name := desired[i].Name
		for _, j := range desired[i].Jumps {
			exprs := encode(w.family, j, w.setOf(j, name, scopeSet), chainPrefix+name)
			w.rest.AddRule(w.link, tableName, baseChain, exprs, "")
		}
	}
}

// updateElements changes the elements of a set and returns true, if nothing else differs. The kernel
// changes the elements of one set in use at once, but not those of two sets.
func (w *tableWriter) updateElements(desired []policy.Chain) bool {
	have := w.have
	if !have.baseOK || len(have.unrecognized) > 0 || len(have.chains) != len(desired) {
		return false
	}
	want, held := map[string]policy.Ranges{}, map[string]policy.Ranges{} // of the sets that differ
	compare := func(w policy.Rule, h rule) bool {
		if equal(w, h) {
			return true
		}
		_, twice := want[h.set]
		want[h.set], held[h.set] = addresses(w), addresses(h.Rule)
		sameKind := (w.From == nil) == (h.From == nil) && (w.To == nil) == (h.To == nil)
		h.From, h.To = w.From, w.To
		return equal(w, h) && sameKind && !twice && !anonymous(h.set)
	}
	jumps := 0
	for _, c := range desired {
		there, to := have.chains[c.Name], have.jumpsTo(c.Name)
		if there == nil || there.owner.Differs(c.Owner) ||
			!slices.EqualFunc(c.Rules, there.rules, compare) || !slices.EqualFunc(c.Jumps, to, compare) {
			return false
		}
		jumps += len(to)
	}
	if len(want) > 1 || jumps != len(have.jumps) {
		return false
	}
	for set := range want {
		w.rest.DeleteElements(w.link, tableName, set, held[set].Minus(want[set]))
		w.rest.AddElements(w.link, tableName, set, want[set].Minus(held[set]))
	}
	return true
}

// remove deletes chains and the unused sets that a writer left that was killed between its two batches.
func (w *tableWriter) remove(gone func(masqChain string) bool) {
	var chains []string
	for name, c := range w.have.chains {
		if gone(name) {
			chains = append(chains, chainPrefix+name)
		} else {
			w.use(c.rules)
		}
	}
	if len(chains) == len(w.have.chains) && (len(chains) > 0 || w.have.leftover()) {
		w.rest.DeleteTable(w.link, tableName)
		return
	}
	for _, j := range w.have.jumps {
		if j.Target != "" && gone(j.Target) {
			w.rest.DeleteRule(w.link, tableName, baseChain, j.handle)
		} else {
			w.use([]rule{j})
		}
	}
	deleteChains(w.rest, w.link, tableName, chains)
	w.deleteSets(ownSet)
}

// leftover reports whether the table has at most the sets of a writer that was killed between its two
// batches.
func (t *table) leftover() bool {
	for name := range t.sets {
		if !ownSet(name) {
			return false
		}
	}
	return t.exists && !t.broken && len(t.jumps)+len(t.chains)+len(t.otherChains) == 0
}

// deleteChains deletes chains, which may jump to each other.
func deleteChains(batch *nfnetlink.Batch, family nfnetlink.Family, table string, names []string) {
	slices.Sort(names)
	for _, name := range names {
		batch.FlushChain(family, table, name)
	}
	for _, name := range names {
		batch.DeleteChain(family, table, name)
	}
}

// deleteSets deletes the sets that no rule will use, of those whose names match.
func (w *tableWriter) deleteSets(match func(name string) bool) {
	for _, name := range slices.Sorted(maps.Keys(w.have.sets)) {
		if !w.used[name] && match(name) {
			w.rest.DeleteSet(w.link, tableName, name)
		}
	}
}

// setNames assigns sets to rules.
type setNames struct {
	sets   map[string]policy.Ranges
	used   map[string]bool
	create func(name string, ranges policy.Ranges)
}

func (n *setNames) use(rules []rule) {
	for _, r := range rules {
		n.used[r.set] = true
	}
}

// setOf returns the set that a rule is to match addresses with, or "". It creates one unless a set of the
// chain has these elements. A rule of an owned chain matches sources or destinations by a set, never both.
func (n *setNames) setOf(r policy.Rule, masqChain, sources string) string {
	ranges, kind := addresses(r), exemptSet
	if ranges == nil {
		return ""
	}
	if r.From != nil {
		kind = sources
	}
	name := ""
	for number := len(n.sets) + 1; number > 0; number-- {
		candidate := setName(kind, masqChain, number)
		held, exists := n.sets[candidate]
		if held != nil && held.Equal(ranges) {
			n.used[candidate] = true
			return candidate
		}
		if !exists {
			name = candidate
		}
	}
	if n.sets == nil {
		n.sets = map[string]policy.Ranges{}
	}
	n.sets[name], n.used[name] = ranges, true
	n.create(name, ranges)
	return name
}

// addresses returns the addresses that a rule matches, or nil.
func addresses(r policy.Rule) policy.Ranges {
	if r.From != nil {
		return r.From
	}
	return r.To
}

func chainsOf(rs policy.Ruleset, f policy.Family) []policy.Chain {
	return slices.DeleteFunc(slices.Clone(rs.Chains), func(c policy.Chain) bool { return c.Family != f })
}

// commentOn returns the comment of a rule: the last rule of a chain names the owner.
func commentOn(c *policy.Chain, rule int) string {
	if rule < len(c.Rules)-1 {
		return ""
	}
	return c.Owner.Comment()
}
