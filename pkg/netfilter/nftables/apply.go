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

// Supported implements netfilter.Backend: no program is involved.
func (b *backend) Supported(context.Context) (policy.Layout, error) { return b.Layout(), nil }

func (b *backend) OwnsTables() bool { return true }

// state is a reading of the owned tables of one name. It is the State of an observation.
type state struct {
	tables     map[policy.Family]*table
	generation uint32 // 0 if the reading is not of one generation
}

// read reads the tables of a name.
//
// If a reading has a generation, nothing was committed while it lasted, so it is complete, and the kernel accepts
// writes at that generation only: a caller needs no second reading before it writes. Beside kube-proxy the
// generation may never be quiet for as long as a reading takes. Then a reading counts if the next one finds the
// same. It has no generation, and the kernel accepts its writes at any.
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
	}, (*state).sameReading)
	if nfnetlink.Unsupported(err) {
		err = unsupported(err)
	}
	if err != nil {
		return nil, err
	}
	s.generation = generation
	return s, nil
}

// sameReading reports whether all tables have the same rules as those that were read later.
func (s *state) sameReading(later *state) bool {
	return maps.EqualFunc(s.tables, later.tables, (*table).sameReading)
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
func (b *backend) Apply(
	_ context.Context, desired policy.Ruleset, from netfilter.Observation, _ *os.File,
) error {
	return b.write(from.State, false, toDesired(desired))
}

// toDesired returns the change after which the tables have exactly the desired chains.
func toDesired(desired policy.Ruleset) func(*tableWriter) {
	return func(w *tableWriter) {
		chains := netfilter.ChainsOf(desired, w.family)
		w.update(masqTable(w.family, chains, w.have))
	}
}

// Remove implements netfilter.Backend. It leaves everything else in the tables, except sets that no
// rule uses, and deletes a table without a masquerade chain.
func (b *backend) Remove(_ context.Context, chains []policy.ChainFamily, _ *os.File) error {
	return b.write(nil, false, func(w *tableWriter) {
		var names []string
		for _, c := range chains {
			if c.Family == w.family {
				names = append(names, c.Chain)
			}
		}
		w.remove(names)
	})
}

// CanWrite implements netfilter.Backend: a program can make itself the owner of a table.
func (b *backend) CanWrite(_ context.Context, f policy.Family) error {
	return b.driver.checkOwner(netfilter.LinkOf(f), tableName)
}

// CanList implements netfilter.Backend: nft lists each table.
func (b *backend) CanList(context.Context, policy.Family) error { return nil }

func (d *Driver) checkOwner(f nfnetlink.Family, table string) error {
	t, err := d.conn.Table(f, table)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return readError(err)
	}
	err = netfilter.CheckTableOwner(f, t)
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	return nil
}

// CheckWrite implements netfilter.Backend.
func (b *backend) CheckWrite(_ context.Context, desired policy.Ruleset, from netfilter.Observation) error {
	return b.write(from.State, true, toDesired(desired))
}

// write changes the tables with masquerade chains, or asks whether the kernel accepts that.
func (b *backend) write(observed any, dryRun bool, change func(*tableWriter)) error {
	err := b.driver.write(observed, tableName, dryRun, change)
	return lacking(err, "CONFIG_NFT_NAT, CONFIG_NFT_MASQ, CONFIG_NFT_FIB_IPV4 and CONFIG_NFT_FIB_IPV6",
		"nft_chain_nat nft_masq nft_fib_ipv4 nft_fib_ipv6 nft_nat", ", or set backend to iptables")
}

// writer is one change of the tables of a name.
type writer struct {
	*Driver
	name       string
	dryRun     bool // ask the kernel, and commit nothing
	change     func(*tableWriter)
	before     *state                    // that was observed, nil if none
	broken     map[nfnetlink.Family]bool // the tables that the kernel refused to change
	encoded    *state                    // that the batches were encoded for
	fill, rest *nfnetlink.Batch
	hasFilled  bool // new sets of a first batch are in the kernel
}

// write changes the tables of a name. A failed write leaves no new sets, unless the kernel refuses that, too: then
// the next write deletes them.
func (d *Driver) write(observed any, name string, dryRun bool, change func(*tableWriter)) error {
	before, _ := observed.(*state)
	w := d.newWriter(name, before, change)
	w.dryRun = dryRun
	err := w.run()
	if err != nil && w.hasFilled {
		_ = d.newWriter(name, nil, (*tableWriter).removeLeftovers).run()
	}
	return err
}

func (d *Driver) newWriter(name string, before *state, change func(*tableWriter)) *writer {
	return &writer{Driver: d, name: name, before: before, change: change, broken: map[nfnetlink.Family]bool{}}
}

// run changes the tables. If another program commits meanwhile, it reads them again and continues, unless the
// rules are no longer the observed ones, if any. A table that the kernel refuses to change counts as broken
// then, as it may have a form that a dump does not show: it is replaced, for that family alone.
func (w *writer) run() error {
	const attempts = 10
	now := w.before
	for n := 1; ; n++ {
		err := w.attempt(now)
		if err == nil {
			return nil
		}
		isStale := errors.Is(err, nfnetlink.ErrStale)
		if isStale && n == attempts {
			return fmt.Errorf("%w: %w", netfilter.ErrChanged, err)
		}
		if !isStale {
			refused := w.refusedTable(err)
			if refused == 0 || w.broken[refused] {
				return w.ownersError(err)
			}
			w.broken[refused] = true
		}
		now = nil // to be read again
	}
}

// refusedTable returns the family whose table the kernel refuses to change, 0 if it is none. What the kernel
// forbids it forbids for a new table, too.
func (w *writer) refusedTable(err error) nfnetlink.Family {
	refused, _ := errors.AsType[*nfnetlink.Error](err)
	if refused == nil || errors.Is(err, os.ErrPermission) {
		return 0
	}
	return refused.Family
}

// ownersError returns that another program owns a table, if that is why the kernel forbids a change: it has
// one number for all that it forbids.
func (w *writer) ownersError(err error) error {
	refused, _ := errors.AsType[*nfnetlink.Error](err)
	isOfTable := refused != nil && refused.Family != 0
	if !isOfTable || !errors.Is(err, os.ErrPermission) {
		return err
	}
	return cmp.Or(w.checkOwner(refused.Family, w.name), err)
}

// attempt reads the tables, unless they are given, and sends the changes.
func (w *writer) attempt(now *state) (err error) {
	if now == nil {
		now, err = w.readAgain()
		if err != nil {
			return err
		}
	}
	for f, t := range now.tables {
		t.broken = t.broken || t.exists && w.broken[netfilter.LinkOf(f)]
	}
	// The batches are kept for the next attempt: while thousands of prefixes are encoded, another program may
	// commit again.
	if w.encoded == nil || !w.encoded.needsSameChange(now) {
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
		// If rest is refused or late, the tables have the new sets by then. Some kernels (5.6 to 5.9) refuse
		// ranges that a set has already.
		w.hasFilled, w.encoded = true, nil
		if now.generation != 0 {
			w.rest.Generation = max(now.generation+1, 1) // the kernel leaves 0 out
		}
	}
	return w.conn.Commit(w.rest)
}

// readAgain reads the tables, which must still have the rules that were observed.
func (w *writer) readAgain() (*state, error) {
	now, err := w.read(w.name)
	isRefusal := errors.Is(err, netfilter.ErrUnusable) || errors.Is(err, os.ErrPermission)
	if err != nil && !isRefusal {
		return nil, readError(err)
	}
	if err != nil {
		return nil, err
	}
	if w.before != nil && !w.before.sameReading(now) {
		return nil, netfilter.ErrChanged
	}
	return now, nil
}

// needsSameChange reports whether the change of all tables is the same for another reading of them.
func (s *state) needsSameChange(other *state) bool {
	for f, t := range s.tables {
		o := other.tables[f]
		if t.exists != o.exists || t.broken != o.broken || !t.sameReading(o) {
			return false
		}
	}
	return true
}

// encode encodes the changes of all tables in two batches: the first one creates and fills new sets, the
// second one does the rest. In one batch, packets can meet a set empty that is created in the batch of the
// rules that use it: 65 to 78 of 200,000 exempt connections were masqueraded (Linux 6.18).
func (w *writer) encode(s *state) {
	w.fill, w.rest, w.encoded = &nfnetlink.Batch{}, &nfnetlink.Batch{}, s
	if w.dryRun {
		w.fill = w.rest
	}
	for _, f := range policy.Families() {
		w.change(&tableWriter{
			link: netfilter.LinkOf(f), family: f, have: s.tables[f], fill: w.fill, rest: w.rest,
		})
	}
}

// tableWriter encodes the change of the table of a family.
type tableWriter struct {
	link       nfnetlink.Family
	family     policy.Family
	have       *table
	fill, rest *nfnetlink.Batch
}

// update writes the smallest change after which the table is as desired. Nil means that there is to be no table.
func (w *tableWriter) update(want *table) {
	have, name := w.have, w.have.name
	if want == nil {
		if have.exists {
			w.rest.DeleteTable(w.link, name)
		}
		return
	}
	fill := w.fill
	if have.broken || have.hasOtherForm(want) {
		// One batch, because no packet may find no table: without it every destination is exempt.
		w.rest.DeleteTable(w.link, name)
		have, fill = newTable(name), w.rest
	}
	if !have.exists {
		fill.AddTable(w.link, name)
	}
	w.addObjects(want, have, fill)
	for _, chain := range namesIn(want.chains, nil) {
		c, held := want.chains[chain], have.chains[chain]
		if held == nil || c.differs(held) {
			w.rewrite(name, chain, c)
		}
	}
	w.deleteOthers(want, have)
}

// hasOtherForm reports whether a desired set exists in another form: two sets of one name cannot exist.
func (t *table) hasOtherForm(want *table) bool {
	for name := range want.sets {
		held, exists := t.sets[name]
		if exists && held == nil {
			return true
		}
	}
	return false
}

// addObjects adds the sets and chains that are missing, and changes the elements of the sets. Rules, which use
// them, are written afterwards.
func (w *tableWriter) addObjects(want, have *table, fill *nfnetlink.Batch) {
	for _, name := range want.order {
		c := want.chains[name]
		if c == nil {
			w.updateSet(name, want, have, fill)
			continue
		}
		if have.chains[name] == nil {
			w.rest.AddChain(w.link, have.name, name, c.base)
		}
	}
}

// rewrite replaces all rules of a chain.
func (w *tableWriter) rewrite(table, name string, c *chain) {
	w.rest.FlushChain(w.link, table, name)
	for _, r := range c.rules {
		w.rest.AddRule(w.link, table, name, r.exprs, r.comment)
	}
}

// deleteOthers deletes the chains and sets that are not wanted.
func (w *tableWriter) deleteOthers(want, have *table) {
	var chains, sets []string
	for name := range have.chains {
		if want.chains[name] == nil {
			chains = append(chains, name)
		}
	}
	for name := range have.sets {
		_, isWanted := want.sets[name]
		if !isWanted {
			sets = append(sets, name)
		}
	}
	w.deleteChains(chains)
	w.deleteSets(have.name, sets)
}

// updateSet changes the elements of a set. A new one is created and filled in the batch fill.
func (w *tableWriter) updateSet(name string, want, have *table, fill *nfnetlink.Batch) {
	batch := w.rest
	ranges := want.sets[name]
	held, exists := have.sets[name]
	if !exists {
		batch = fill
		batch.AddSet(w.link, have.name, setForm(w.link, name))
	}
	batch.DeleteElements(w.link, have.name, name, held.ElementsNotIn(ranges))
	batch.AddElements(w.link, have.name, name, ranges.ElementsNotIn(held))
}

// remove deletes masquerade chains, the jumps to them and the sets that no rule uses then. It deletes a table
// without another masquerade chain.
func (w *tableWriter) remove(masqChains []string) {
	var deleted []string // chains of the table
	hasOthers := false
	for name := range w.have.chains {
		masqChain, isMasq := masqChainOf(name)
		if !isMasq {
			continue
		}
		if slices.Contains(masqChains, masqChain) {
			deleted = append(deleted, name)
		} else {
			hasOthers = true
		}
	}
	if len(deleted) == 0 {
		w.removeLeftovers()
		return
	}
	if !hasOthers {
		w.rest.DeleteTable(w.link, tableName)
		return
	}
	rest := maps.Clone(w.have.chains)
	for _, name := range deleted {
		delete(rest, name)
	}
	base := rest[baseChain]
	if base != nil {
		rest[baseChain] = w.deleteJumps(base, deleted)
	}
	w.deleteChains(deleted)
	w.deleteUnusedSets(rest)
}

// removeLeftovers deletes what a writer left that failed, or was killed, between its two batches: sets that no rule
// uses, and the table if it has nothing else.
func (w *tableWriter) removeLeftovers() {
	if w.have.isLeftover() {
		w.rest.DeleteTable(w.link, w.have.name)
		return
	}
	w.deleteUnusedSets(w.have.chains)
}

// deleteUnusedSets deletes the owned sets that no rule of the chains uses.
func (w *tableWriter) deleteUnusedSets(chains map[string]*chain) {
	used := usedSets(chains)
	var unused []string
	for name := range w.have.sets {
		if !used[name] && w.have.ownsSet(name) {
			unused = append(unused, name)
		}
	}
	w.deleteSets(w.have.name, unused)
}

// deleteJumps deletes the jumps of the base chain to chains, and returns the base chain without them.
func (w *tableWriter) deleteJumps(base *chain, to []string) *chain {
	rest := &chain{base: base.base}
	for _, r := range base.rules {
		if slices.Contains(to, r.target()) {
			w.rest.DeleteRule(w.link, tableName, baseChain, r.handle)
		} else {
			rest.rules = append(rest.rules, r)
		}
	}
	return rest
}

// isLeftover reports whether the table has at most the sets of a writer killed between its batches.
func (t *table) isLeftover() bool {
	if !t.exists || t.broken {
		return false
	}
	for name := range t.sets {
		if !t.ownsSet(name) {
			return false
		}
	}
	for name, c := range t.chains {
		isEmptyBase := name == baseChain && len(c.rules) == 0
		if !isEmptyBase {
			return false
		}
	}
	return true
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

func (w *tableWriter) deleteSets(table string, names []string) {
	slices.Sort(names)
	for _, name := range names {
		w.rest.DeleteSet(w.link, table, name)
	}
}

// namesIn returns the names in either map, in order.
func namesIn[T any](a, b map[string]T) []string {
	names := slices.AppendSeq(slices.Sorted(maps.Keys(a)), maps.Keys(b))
	slices.Sort(names)
	return slices.Compact(names)
}
