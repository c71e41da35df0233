// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// batches returns the plans of both families as operations: new sets in a first
// batch, all else in a second. What replaces a table whole can only be one batch.
func batches(plans []*plan) (first, second *nfnetlink.Batch) {
	first, second = &nfnetlink.Batch{}, &nfnetlink.Batch{}
	for _, p := range plans {
		if p.empty() {
			continue
		}
		w := writer{plan: p, header: headerOf(p.family), first: first, second: second}
		if p.replace {
			w.first = second
		}
		w.write()
	}
	return first, second
}

// commit carries out the plans. A batch that is too long is refused before the
// first is sent.
func commit(conn *nfnetlink.Conn, plans []*plan) error {
	first, second := batches(plans)
	if err := errors.Join(conn.Fit(first), conn.Fit(second)); err != nil {
		return err
	}
	for _, b := range []*nfnetlink.Batch{first, second} {
		if b.Len() == 0 {
			continue
		}
		if err := conn.Commit(b); err != nil {
			return err
		}
	}
	return nil
}

type writer struct {
	*plan
	header
	first, second *nfnetlink.Batch
}

func (w *writer) write() {
	if w.drop || w.replace {
		w.second.DeleteTable(w.link, tableName)
	}
	if w.drop {
		return
	}
	w.fillSets()
	b := w.second
	for _, d := range w.deltas {
		b.DeleteElements(w.link, tableName, d.set, rangesOf(d.del))
		b.AddElements(w.link, tableName, d.set, rangesOf(d.add))
	}
	if len(w.deltas) > 0 {
		return
	}
	b.AddTable(w.link, tableName)
	if w.hook {
		base := wantedBase()
		b.AddChain(w.link, tableName, baseChain, &base)
	}
	if w.rehook && !w.hook {
		b.FlushChain(w.link, tableName, baseChain)
	}
	for _, handle := range w.goneJumps {
		b.DeleteRule(w.link, tableName, baseChain, handle)
	}
	w.emptyGone()
	for _, r := range w.rewrite {
		w.rewriteChain(r)
	}
	for _, r := range w.jumps {
		for i, j := range r.chain.Jumps {
			b.AddRule(w.link, tableName, baseChain, encode(w.family, j, r.sets[i], chainPrefix+r.chain.Name), "")
		}
	}
	for _, name := range w.goneChains {
		b.DeleteChain(w.link, tableName, name)
	}
	for _, name := range w.goneSets {
		b.DeleteSet(w.link, tableName, name)
	}
}

func (w *writer) fillSets() {
	if len(w.newSets) == 0 {
		return
	}
	key := nfnetlink.TypeIPv4
	if w.family == policy.IPv6 {
		key = nfnetlink.TypeIPv6
	}
	w.first.AddTable(w.link, tableName)
	for _, s := range w.newSets {
		w.first.AddSet(w.link, tableName, s.name, key)
		w.first.AddElements(w.link, tableName, s.name, rangesOf(s.ranges))
	}
}

// emptyGone takes the rules out of the chains that go, which may jump to each
// other and name sets that go too.
func (w *writer) emptyGone() {
	for _, name := range w.goneChains {
		w.second.FlushChain(w.link, tableName, name)
	}
}

func (w *writer) rewriteChain(r rewritten) {
	name := chainPrefix + r.chain.Name
	w.second.AddChain(w.link, tableName, name, nil)
	if !r.fresh {
		w.second.FlushChain(w.link, tableName, name)
	}
	for i, rule := range r.chain.Rules {
		w.second.AddRule(w.link, tableName, name, encode(w.family, rule, r.sets[i], ""), commentOn(r.chain, i))
	}
}

// commentOn returns the comment of a rule of a chain: the owner's, on the last.
func commentOn(c *policy.Chain, rule int) string {
	if rule < len(c.Rules)-1 {
		return ""
	}
	return c.Owner.Comment()
}

func rangesOf(r policy.Ranges) []nfnetlink.Range {
	out := make([]nfnetlink.Range, len(r))
	for i, x := range r {
		out[i] = nfnetlink.Range{First: x.From(), Last: x.To()}
	}
	return out
}
