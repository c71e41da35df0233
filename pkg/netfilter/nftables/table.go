// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// table is an owned table of a family, ip-masq or ip-masq-guard, as it is to be or as it was read.
type table struct {
	name   string
	exists bool // in the kernel; also of a desired guard table, which is compared with one that was read
	broken bool // has something that can only be removed with the table
	// By name, without anonymous ones. The ranges are nil for a set of another form than an owned one.
	sets         map[string]policy.Ranges
	chains       map[string]*chain // by name
	order        []string          // of the chains, and of the sets of a desired table
	unrecognized []string          // what should not be there, for people
}

type chain struct {
	base  *nfnetlink.Base // nil for a chain that is not a base chain, or not known to be one
	rules []rule
}

// rule is a rule of an owned table. Rules are compared by their expressions.
type rule struct {
	handle  uint64
	exprs   []nfnetlink.Expr // with counters at 0
	packets uint64           // the counter
	comment string
	text    string // in nft syntax; "" of a rule that was read
}

func newTable(name string) *table {
	return &table{name: name, sets: map[string]policy.Ranges{}, chains: map[string]*chain{}}
}

// hookOf returns the hook of a base chain: type nat hook postrouting priority 101; policy accept. The first
// NAT rule that matches decides. So postrouting comes after the chains of kube-proxy and iptables (100), and
// enforce before those of all other programs. Guard is behind all NAT, which is one hook at 100 whatever the
// priorities of its chains.
func hookOf(chain string) (hook nfnetlink.Base, isBase bool) {
	hook = nfnetlink.Base{Type: "nat", Hook: unix.NF_INET_POST_ROUTING, Policy: nfnetlink.Accept}
	switch chain {
	case enforceChain:
		hook.Priority = 99
	case baseChain:
		hook.Priority = 101
	case guardChain:
		hook.Type, hook.Priority = "filter", 200
	default:
		return nfnetlink.Base{}, false
	}
	return hook, true
}

// setForm returns the form of an owned set.
func setForm(f nfnetlink.Family, name string) nfnetlink.Set {
	if name == selfSet {
		// An element is needed for two rules of one packet. The shorter it lives, the more sources a pod must
		// forge to fill the set.
		const size = 65535
		return nfnetlink.AddressPairs(f, name, size, time.Second)
	}
	return nfnetlink.AddressRanges(f, name)
}

// add appends a rule to a chain, without the statements that are empty.
func (t *table) add(name, comment string, statements ...nftStatement) {
	r := rule{comment: comment}
	var words []string
	for _, s := range statements {
		if s.nft != "" {
			r.exprs, words = append(r.exprs, s.exprs...), append(words, s.nft)
		}
	}
	if comment != "" {
		words = append(words, `comment "`+comment+`"`)
	}
	r.text = strings.Join(words, " ")
	c := t.addChain(name)
	c.rules = append(c.rules, r)
}

func (t *table) addChain(name string) *chain {
	if t.chains[name] == nil {
		t.chains[name] = &chain{}
		if hook, isBase := hookOf(name); isBase {
			t.chains[name].base = &hook
		}
		t.order = append(t.order, name)
	}
	return t.chains[name]
}

func (t *table) addSet(name string, ranges policy.Ranges) {
	if _, exists := t.sets[name]; !exists {
		t.order = append(t.order, name)
	}
	t.sets[name] = ranges
}

// String returns the rule for people, in nft syntax or by the names of its expressions.
func (r rule) String() string {
	if r.text != "" {
		return r.text
	}
	text := "rule of"
	for _, e := range r.exprs {
		text += " " + e.Name()
	}
	return text
}

// target returns the chain that a rule jumps or goes to, or "".
func (r rule) target() string {
	if len(r.exprs) == 0 {
		return ""
	}
	verdict, _ := r.exprs[len(r.exprs)-1].(nfnetlink.Verdict)
	return verdict.Chain
}

func setIn(e nfnetlink.Expr) string {
	switch e := e.(type) {
	case nfnetlink.Lookup:
		return e.Set
	case nfnetlink.Dynset:
		return e.Set
	}
	return ""
}

func usedSets(chains map[string]*chain) map[string]bool {
	used := map[string]bool{}
	for _, c := range chains {
		for _, r := range c.rules {
			for _, e := range r.exprs {
				used[setIn(e)] = true
			}
		}
	}
	delete(used, "")
	return used
}

// sameExprs compares rules without their comments and handles.
func (r rule) sameExprs(s rule) bool { return reflect.DeepEqual(r.exprs, s.exprs) }

// owner returns the owner that a rule of the chain names.
func (c *chain) owner() (o policy.Owner) {
	for _, r := range c.rules {
		if r.comment != "" {
			o = cmp.Or(policy.ParseOwner(r.comment), o)
		}
	}
	return o
}

// differs reports whether a chain has other rules, or those of another owner.
func (c *chain) differs(have *chain) bool {
	return have.owner().Differs(c.owner()) || !slices.EqualFunc(c.rules, have.rules, rule.sameExprs)
}

// sameReading reports whether the table as it was read later has the same rules and sets. It may have new sets.
func (t *table) sameReading(later *table) bool {
	for name, held := range t.sets {
		now, exists := later.sets[name]
		if !exists || !held.Equal(now) {
			return false
		}
	}
	if !slices.Equal(t.unrecognized, later.unrecognized) {
		return false
	}
	return maps.EqualFunc(t.chains, later.chains, (*chain).sameReading)
}

// sameReading reports whether a chain as it was read later is the same, handles included.
func (c *chain) sameReading(later *chain) bool {
	return reflect.DeepEqual(c.base, later.base) && slices.EqualFunc(c.rules, later.rules, rule.sameReading)
}

func (r rule) sameReading(later rule) bool {
	return r.sameExprs(later) && r.comment == later.comment && r.handle == later.handle
}

// anonymous reports whether a set belongs to a rule and is deleted with it. The table's number of objects is
// without it.
func anonymous(set string) bool { return strings.HasPrefix(set, "__") }

type tableReader struct {
	*table
	link        nfnetlink.Family
	conn        *nfnetlink.Conn
	objectsRead uint32 // of those that the kernel counts in the table
}

// readTable reads an owned table: the rules in one dump, and each set that they use in another. The other
// chains and sets are listed only if the kernel counts more objects than that.
func readTable(conn *nfnetlink.Conn, f policy.Family, name string) (*table, error) {
	r := tableReader{table: newTable(name), link: netfilter.LinkOf(f), conn: conn}
	inKernel, err := conn.Table(r.link, name)
	if errors.Is(err, os.ErrNotExist) {
		return r.table, nil
	}
	if err != nil {
		return nil, err
	}
	r.exists = true
	if inKernel.Flags != 0 {
		r.broken = true
		r.report("table has flags %#x (1: dormant, 2: owner, 4: persist)", inKernel.Flags)
	}
	rules, err := conn.Rules(r.link, name, "")
	if err != nil {
		return r.table, err
	}
	for _, raw := range rules {
		if err := r.readRule(raw); err != nil {
			return r.table, err
		}
	}
	if r.objectsRead == inKernel.Use {
		return r.table, nil
	}
	return r.table, r.readRest(inKernel.Use)
}

func (r *tableReader) report(format string, args ...any) {
	r.unrecognized = append(r.unrecognized, fmt.Sprintf(format, args...))
}

// readChain notes a chain and compares its hook with that which it should have, as the kernel cannot change
// it.
func (r *tableReader) readChain(c nfnetlink.Chain) *chain {
	r.objectsRead++
	want, isBase := hookOf(c.Name)
	isRight := c.Base != nil && *c.Base == want
	if isBase && !isRight {
		r.broken = true
		r.report("chain %s is not the base chain that it should be", c.Name)
	}
	r.order = append(r.order, c.Name)
	r.chains[c.Name] = &chain{base: c.Base}
	return r.chains[c.Name]
}

func (r *tableReader) readRule(raw nfnetlink.Rule) error {
	c, err := r.chainOf(raw)
	if err != nil {
		return err
	}
	rule := rule{handle: raw.Handle, exprs: raw.Exprs, comment: raw.Comment}
	for i, e := range rule.exprs {
		counter, isCounter := e.(nfnetlink.Counter)
		if isCounter {
			rule.packets, rule.exprs[i] = counter.Packets, nfnetlink.Counter{}
		}
		set := setIn(e)
		if set == "" || anonymous(set) {
			continue
		}
		if err := r.readSet(set); err != nil {
			return err
		}
	}
	c.rules = append(c.rules, rule)
	return nil
}

// chainOf returns the chain of a rule. The kernel is asked for base chains alone: the hook of another chain,
// which the rules do not tell, has no meaning here.
func (r *tableReader) chainOf(raw nfnetlink.Rule) (*chain, error) {
	c := r.chains[raw.Chain]
	if c != nil {
		return c, nil
	}
	_, isBase := hookOf(raw.Chain)
	if !isBase {
		return r.readChain(nfnetlink.Chain{Name: raw.Chain}), nil
	}
	inKernel, err := r.conn.Chain(r.link, r.name, raw.Chain)
	if err != nil {
		return nil, err
	}
	return r.readChain(inKernel), nil
}

// readSet reads the elements of a set once, and none of one that rules fill.
func (r *tableReader) readSet(name string) error {
	if _, known := r.sets[name]; known {
		return nil
	}
	var s nfnetlink.Set
	var err error
	ranges, form := policy.Ranges{}, setForm(r.link, name)
	if form.Timeout == 0 {
		s, ranges, err = r.conn.Ranges(r.link, r.name, name)
	} else {
		s, err = r.conn.Set(r.link, r.name, name)
	}
	if err != nil && !errors.Is(err, nfnetlink.ErrNotAddresses) {
		return err
	}
	r.objectsRead++
	switch {
	case s != form:
		r.report("set %s does not have the type, flags, size and timeout of owned sets", policy.Quote(name))
		ranges = nil
	case err != nil:
		r.report("%v", err)
	}
	r.sets[name] = ranges
	return nil
}

// readRest reads the chains without rules and the sets that no rule uses. The table has the given number of
// objects.
func (r *tableReader) readRest(objects uint32) error {
	chains, err := r.conn.Chains(r.link, r.name)
	if err != nil {
		return err
	}
	for _, c := range chains {
		if r.chains[c.Name] == nil {
			r.readChain(c)
		}
	}
	sets, err := r.conn.Sets(r.link, r.name)
	if err != nil {
		return err
	}
	for _, s := range sets {
		if anonymous(s.Name) {
			continue
		}
		if err := r.readSet(s.Name); err != nil {
			return err
		}
	}
	if r.objectsRead != objects {
		r.broken = true
		r.report("an object that is neither a chain nor a set")
	}
	return nil
}

func (t *table) render(f policy.Family) string {
	var sets, chains strings.Builder
	for _, name := range t.order {
		ranges, isSet := t.sets[name]
		if isSet {
			sets.WriteString(renderSet(f, setForm(netfilter.LinkOf(f), name), ranges))
		} else {
			chains.WriteString(t.chains[name].render(name))
		}
	}
	return sets.String() + chains.String()
}

func (c *chain) render(name string) string {
	text := fmt.Sprintf("\tchain %s {\n", name)
	if c.base != nil {
		const hook = "\t\ttype %s hook postrouting priority %d; policy accept;\n"
		text += fmt.Sprintf(hook, c.base.Type, c.base.Priority)
	}
	for _, r := range c.rules {
		text += "\t\t" + r.text + "\n"
	}
	return text + "\t}\n"
}
