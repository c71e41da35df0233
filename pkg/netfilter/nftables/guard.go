// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// masqChainOfGuard returns the masquerade chain that a set or chain of a guard table belongs to, or "".
func masqChainOfGuard(name string) string {
	kind, chain, _ := strings.Cut(name, "-")
	if slices.Contains([]string{guardChain, enforceChain, podsSet, exemptSet, boundSet}, kind) {
		return chain
	}
	return ""
}

// masqChain returns the masquerade chain that a rule of a chain belongs to, or "".
func (r guardRule) masqChain(of string) string {
	if n := len(r.exprs); n > 0 {
		if v, jumps := r.exprs[n-1].(nfnetlink.Verdict); jumps && v.Chain != "" {
			of = v.Chain
		}
	}
	return masqChainOfGuard(of)
}

// same compares rules without their comments.
func (r guardRule) same(s guardRule) bool { return reflect.DeepEqual(r.exprs, s.exprs) }

// sameRules reports whether the table as it was read later has the same rules, with the same sets.
func (t *guardTable) sameRules(later *guardTable) bool {
	same := func(a, b *guardRules) bool {
		return reflect.DeepEqual(a.base, b.base) && slices.EqualFunc(a.rules, b.rules, func(a, b guardRule) bool {
			return a.same(b) && a.comment == b.comment
		})
	}
	for name, held := range t.sets {
		if now, exists := later.sets[name]; !exists || !held.Equal(now) {
			return false
		}
	}
	return maps.EqualFunc(t.chains, later.chains, same)
}

// owner returns the owner that a rule of the chain names.
func (c *guardRules) owner() (o policy.Owner) {
	for _, r := range c.rules {
		o = cmp.Or(policy.ParseOwner(r.comment), o)
	}
	return o
}

// differs reports whether a chain has other rules, or those of another owner.
func (c *guardRules) differs(have *guardRules) bool {
	return have.owner().Differs(c.owner()) || !slices.EqualFunc(c.rules, have.rules, guardRule.same)
}

// readGuardTable reads a guard table as readTable does the other one.
func readGuardTable(conn *nfnetlink.Conn, f policy.Family) (*guardTable, error) {
	t := &guardTable{chains: map[string]*guardRules{}}
	r := newObjectReader(conn, f, netfilter.GuardTable, &t.tableObjects)
	h := headerOf(f)
	objects, baseOK, err := r.header(guardChain, guardHook(guardChain))
	if err != nil || !t.exists {
		return t, err
	}
	if baseOK {
		base := guardHook(guardChain)
		t.chains[guardChain] = &guardRules{base: &base}
	}
	rules, err := conn.Rules(h.link, netfilter.GuardTable, "")
	if err != nil {
		return nil, err
	}
	for _, raw := range rules {
		c := t.chains[raw.Chain]
		if c == nil {
			c = &guardRules{}
			t.chains[raw.Chain] = c
			if r.read++; raw.Chain == enforceChain {
				chain, err := conn.Chain(h.link, netfilter.GuardTable, enforceChain)
				if err != nil {
					return nil, err
				}
				r.checkBase(chain, guardHook(enforceChain))
				c.base = chain.Base
			}
		}
		raw.Exprs = rangesAsComparisons(raw.Exprs)
		rule := guardRule{exprs: raw.Exprs, comment: raw.Comment, text: "rule of"}
		for i, e := range raw.Exprs {
			rule.text += " " + nfnetlink.ExprName(e)
			switch e := e.(type) {
			case nfnetlink.Counter:
				rule.packets, raw.Exprs[i] = e.Packets, nfnetlink.Counter{}
			case nfnetlink.Lookup:
				_, err = r.readSet(h.guardSet(e.Set))
			case nfnetlink.Dynset:
				_, err = r.readSet(h.guardSet(e.Set))
			}
			if err != nil {
				return nil, err
			}
		}
		c.rules = append(c.rules, rule)
	}
	if r.read == objects {
		return t, nil
	}
	chains, sets, err := r.rest(objects)
	if err != nil {
		return nil, err
	}
	for _, c := range chains {
		if t.chains[c.Name] != nil {
			continue
		}
		if t.chains[c.Name] = (&guardRules{base: c.Base}); c.Name == enforceChain {
			r.checkBase(c, guardHook(enforceChain))
		}
	}
	for _, s := range sets {
		if _, err := r.readSet(h.guardSet(s.Name)); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// rangesAsComparisons returns the expressions with each match of a range as two comparisons. nft 1.1.7
// loads `icmpv6 type 133-137` as a range; nft 1.1.3 and the driver write comparisons.
func rangesAsComparisons(exprs []nfnetlink.Expr) []nfnetlink.Expr {
	var all []nfnetlink.Expr
	for _, e := range exprs {
		if r, ok := e.(nfnetlink.CmpRange); ok && !r.Not {
			all = append(all, nfnetlink.Cmp{Op: nfnetlink.GreaterOrEqual, Sreg: r.Sreg, Data: r.From},
				nfnetlink.Cmp{Op: nfnetlink.LessOrEqual, Sreg: r.Sreg, Data: r.To})
			continue
		}
		all = append(all, e)
	}
	return all
}

// compare returns how the table differs from the desired one, of which nil is none.
func (t *guardTable) compare(f policy.Family, want *guardTable) (d policy.Diff) {
	if want == nil {
		want = &guardTable{}
	}
	add := func(kind policy.ChangeKind, chain string, unexpected bool, text string) {
		d = append(d, policy.Change{Kind: kind, Family: f, Chain: chain, Unexpected: unexpected, Text: policy.Printable(text)})
	}
	if want.exists && !t.exists { // one change for each masquerade chain
		for _, name := range sorted(want.sets, nil) {
			if kind, chain, _ := strings.Cut(name, "-"); kind == podsSet {
				add(policy.GuardChange, chain, false, "table "+netfilter.GuardTable)
			}
		}
		return d
	}
	if t.exists && !want.exists {
		add(policy.GuardChange, "", true, "table "+netfilter.GuardTable)
	}
	for _, text := range t.unrecognized {
		add(policy.GuardChange, "", true, text)
	}
	for _, name := range sorted(want.sets, t.sets) {
		wanted, isWanted := want.sets[name]
		held, exists := t.sets[name]
		switch kind, chain := strings.Split(name, "-")[0], masqChainOfGuard(name); {
		case !exists:
			add(policy.GuardChange, chain, false, "set "+name)
		case held == nil || anonymous(name): // reported, or part of a rule
		case !isWanted:
			add(policy.GuardChange, chain, true, "set "+name)
		default:
			for _, r := range wanted.Minus(held) {
				add(policy.ElementChange, chain, false, kind+" "+policy.Ranges{r}.String()+" (guard)")
			}
			for _, r := range held.Minus(wanted) {
				add(policy.ElementChange, chain, true, kind+" "+policy.Ranges{r}.String()+" (guard)")
			}
		}
	}
	for _, name := range sorted(want.chains, t.chains) {
		wanted, held, where := want.chains[name], t.chains[name], "chain "+name
		switch chain := masqChainOfGuard(name); {
		case wanted == nil:
			add(policy.GuardChange, chain, true, where)
			continue
		case held == nil:
			add(policy.GuardChange, chain, false, where)
			held = &guardRules{}
		case held.owner().Differs(wanted.owner()):
			add(policy.GuardChange, chain, true, where+" of "+held.owner().DataDir)
		}
		surplus, paired := slices.Clone(held.rules), 0
		for _, r := range wanted.rules {
			if i := slices.IndexFunc(surplus, r.same); i >= 0 {
				surplus = slices.Delete(surplus, i, i+1)
				paired++
			} else if t.chains[name] != nil || wanted.base != nil {
				add(policy.GuardChange, r.masqChain(name), false, where+": "+r.text)
			}
		}
		for _, r := range surplus {
			add(policy.GuardChange, r.masqChain(name), true, where+": "+r.text)
		}
		if paired == len(wanted.rules) && len(surplus) == 0 && !slices.EqualFunc(wanted.rules, held.rules, guardRule.same) {
			add(policy.GuardChange, masqChainOfGuard(name), true, where+": rules out of order")
		}
	}
	return d
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

// update writes the smallest change after which the table is as desired. nil is none.
func (t *guardTable) update(h header, want *guardTable, fill, rest *nfnetlink.Batch) {
	if want == nil {
		if t.exists {
			rest.DeleteTable(h.link, netfilter.GuardTable)
		}
		return
	}
	for name := range want.sets {
		held, exists := t.sets[name]
		t.broken = t.broken || exists && held == nil // a set of another form: two of one name cannot exist
	}
	if t.broken { // one batch, because no packet may find a table without its sets
		rest.DeleteTable(h.link, netfilter.GuardTable)
		t, fill = &guardTable{}, rest
	}
	if !t.exists {
		fill.AddTable(h.link, netfilter.GuardTable)
	}
	for _, name := range sorted(want.sets, nil) {
		held, exists := t.sets[name]
		batch := rest
		if !exists {
			batch = fill
			batch.AddSet(h.link, netfilter.GuardTable, h.guardSet(name))
		}
		batch.DeleteElements(h.link, netfilter.GuardTable, name, held.Minus(want.sets[name]))
		batch.AddElements(h.link, netfilter.GuardTable, name, want.sets[name].Minus(held))
	}
	for _, name := range sorted(want.chains, nil) {
		if t.chains[name] == nil {
			rest.AddChain(h.link, netfilter.GuardTable, name, want.chains[name].base)
		}
	}
	for _, name := range sorted(want.chains, nil) {
		c, held := want.chains[name], t.chains[name]
		if held != nil && !c.differs(held) {
			continue
		}
		if held != nil {
			rest.FlushChain(h.link, netfilter.GuardTable, name)
		}
		for _, r := range c.rules {
			rest.AddRule(h.link, netfilter.GuardTable, name, r.exprs, r.comment)
		}
	}
	gone := slices.DeleteFunc(sorted(t.chains, nil), func(name string) bool { return want.chains[name] != nil })
	deleteChains(rest, h.link, netfilter.GuardTable, gone)
	for _, name := range sorted(t.sets, nil) {
		if _, wanted := want.sets[name]; !wanted && !anonymous(name) {
			rest.DeleteSet(h.link, netfilter.GuardTable, name)
		}
	}
}

func (d *Driver) readGuards() (*state, error) {
	s, err := d.read(func(conn *nfnetlink.Conn, s *state, f policy.Family) (err error) {
		s.guards[f], err = readGuardTable(conn, f)
		return err
	})
	if nfnetlink.Unsupported(err) {
		err = usable(err)
	}
	return s, err
}

// ObserveGuards implements netfilter.GuardTables.
func (d *Driver) ObserveGuards(context.Context) (netfilter.GuardObservation, error) {
	s, err := d.readGuards()
	if err != nil {
		return netfilter.GuardObservation{}, err
	}
	o := netfilter.GuardObservation{Packets: map[policy.ChainFamily]uint64{}, Generation: s.generation, State: s}
	for _, f := range policy.Families() {
		t := s.guards[f]
		o.Exists = o.Exists || t.exists
		d.guards = d.guards || t.exists
		owners, modes := map[string]policy.Owner{}, map[string]policy.GuardMode{}
		for name, c := range t.chains {
			kind, chain, found := strings.Cut(name, "-")
			if !found || kind != guardChain && kind != enforceChain {
				continue
			}
			owners[chain] = cmp.Or(owners[chain], c.owner())
			if modes[chain] = cmp.Or(modes[chain], policy.GuardOff); kind == enforceChain {
				continue
			}
			modes[chain] = policy.GuardCount
			for _, r := range c.rules {
				o.Packets[policy.ChainFamily{Chain: chain, Family: f}] += r.packets
				if slices.ContainsFunc(r.exprs, func(e nfnetlink.Expr) bool { return e == nfnetlink.Verdict{Code: nfnetlink.Drop} }) {
					modes[chain] = policy.GuardDrop
				}
			}
		}
		for _, chain := range slices.Sorted(maps.Keys(owners)) {
			g := policy.Guard{Chain: chain, Family: f, Owner: owners[chain], Scope: policy.Scope{Sources: t.sets[podsSet+"-"+chain]},
				Mode: modes[chain], Exempt: t.sets[exemptSet+"-"+chain], Bound: t.sets[boundSet+"-"+chain]}
			t.readJumps(&g)
			o.Guards = append(o.Guards, g)
		}
	}
	return o, nil
}

// readJumps sets what the jumps to the chains of a guard match: [oifname X] [meta mark & 0x6000 == 0].
func (t *guardTable) readJumps(g *policy.Guard) {
	for _, base := range []string{guardChain, enforceChain} {
		if t.chains[base] == nil {
			continue
		}
		for _, r := range t.chains[base].rules {
			if r.masqChain(base) != g.Chain {
				continue
			}
			for _, c := range nfnetlink.Decode(headerOf(g.Family).link, nfnetlink.Rule{Exprs: r.exprs}, nil).Conditions {
				switch {
				case c.Field == nfnetlink.Mark:
					g.BypassMark = policy.Mark(c.Mask)
				case c.Field == nfnetlink.OutputName && !slices.Contains(g.Scope.Interfaces, c.Name):
					g.Scope.Interfaces = append(g.Scope.Interfaces, c.Name)
				}
			}
		}
	}
}

// CompareGuards implements netfilter.GuardTables.
func (*Driver) CompareGuards(desired []policy.Guard, observed netfilter.GuardObservation) (d policy.Diff) {
	s, _ := observed.State.(*state)
	want := guardTablesOf(desired)
	for _, f := range policy.Families() {
		have := &guardTable{}
		if s != nil {
			have = s.guards[f]
		}
		d = append(d, have.compare(f, want[f])...)
	}
	return d
}

// ApplyGuards implements netfilter.GuardTables.
func (d *Driver) ApplyGuards(_ context.Context, desired []policy.Guard, from netfilter.GuardObservation) error {
	s, _ := from.State.(*state)
	want := guardTablesOf(desired)
	_, err := d.write(s, d.readGuards, func(s *state) (fill, rest *nfnetlink.Batch) { return s.guardBatches(want) })
	err = guardsUsable(err)
	d.guards = d.guards && !errors.Is(err, netfilter.ErrUnusable)
	return err
}

// CheckGuards implements netfilter.GuardTables. A batch that is not committed takes as long as a repair.
func (d *Driver) CheckGuards(_ context.Context, desired []policy.Guard) error {
	conn, err := d.dial()
	if err != nil || d.guards {
		return err
	}
	batch := &nfnetlink.Batch{}
	for f, want := range guardTablesOf(desired) {
		(&guardTable{}).update(headerOf(f), want, batch, batch)
	}
	return guardsUsable(conn.Check(batch))
}

// guardsUsable makes an error with which the kernel refused an expression or a chain that it does not have
// one of tables that cannot be used.
func guardsUsable(err error) error {
	if _, lacks := refusedByKernel(err); !lacks {
		return err
	}
	return fmt.Errorf("nftables: %w: %w; the guard needs CONFIG_NFT_FIB_IPV4, CONFIG_NFT_FIB_IPV6, CONFIG_NFT_NAT and CONFIG_NFT_CT; %s",
		netfilter.ErrUnusable, err, netfilter.HowToLoad("nft_fib_ipv4 nft_fib_ipv6 nft_chain_nat nft_ct"))
}

func (s *state) guardBatches(want map[policy.Family]*guardTable) (fill, rest *nfnetlink.Batch) {
	fill, rest = &nfnetlink.Batch{}, &nfnetlink.Batch{}
	for _, f := range policy.Families() {
		s.guards[f].update(headerOf(f), want[f], fill, rest)
	}
	return fill, rest
}

// RenderGuards implements netfilter.GuardTables.
func (*Driver) RenderGuards(desired []policy.Guard, families ...policy.Family) []byte {
	tables := guardTablesOf(desired)
	var b strings.Builder
	renderTables(&b, netfilter.GuardTable, families, func(f policy.Family) string {
		if tables[f] == nil {
			return ""
		}
		return tables[f].render(f)
	})
	return []byte(b.String())
}
