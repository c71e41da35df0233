// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// reading is one reading of a table.
type reading struct {
	conn   *nfnetlink.Conn
	family policy.Family
	link   nfnetlink.Family
	table  *table
	use    uint32 // objects in the table, by the kernel's count
	seen   uint32 // those that were met
}

// read reads one of our tables: the rules in one dump, each set that they name
// in another. Only if the kernel counts more objects in the table than were met
// that way are its chains and sets listed.
func read(conn *nfnetlink.Conn, f policy.Family) (*table, error) {
	r := reading{conn: conn, family: f, link: headerOf(f).link, table: &table{
		chains: map[string]*chain{}, sets: map[string]policy.Ranges{},
	}}
	found, base, err := conn.TableAndChain(r.link, tableName, baseChain)
	if errors.Is(err, os.ErrNotExist) {
		return r.table, nil
	}
	if err != nil {
		return nil, err
	}
	r.table.exists, r.use = true, found.Use
	if found.Flags != 0 {
		r.table.broken = true
		r.alien("table has flags %#x (dormant?)", found.Flags)
	}
	r.base(base)
	for _, step := range []func() error{r.rules, r.rest} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return r.table, nil
}

func (r *reading) alien(format string, args ...any) {
	r.table.aliens = append(r.table.aliens, fmt.Sprintf(format, args...))
}

func wantedBase() nfnetlink.Base {
	return nfnetlink.Base{Type: "nat", Hook: unix.NF_INET_POST_ROUTING, Priority: priority, Policy: nfnetlink.Accept}
}

// base looks at the base chain, nil if there is none. Its hook cannot be changed
// where it stands.
func (r *reading) base(c *nfnetlink.Chain) {
	if c == nil {
		return
	}
	r.seen++
	r.table.hooked = c.Base != nil && *c.Base == wantedBase()
	if !r.table.hooked {
		r.table.broken = true
		r.alien("chain %s is not the base chain that it should be", baseChain)
	}
}

func (r *reading) rules() error {
	rules, err := r.conn.Rules(r.link, tableName, "")
	if err != nil {
		return err
	}
	for _, rule := range rules {
		d, err := decode(r.family, rule.Exprs, r.set)
		if err != nil {
			return err
		}
		if rule.Chain == baseChain {
			r.jump(rule.Handle, d)
			continue
		}
		name, ours := masqChainOf(rule.Chain)
		if !ours || d.rule.Verdict == policy.Jump {
			d.rule = alienRule(rule.Exprs)
		}
		if !ours {
			continue // listed as a stray chain
		}
		c := r.table.chains[name]
		if c == nil {
			c = &chain{}
			r.table.chains[name] = c
			r.seen++
		}
		c.rules = append(c.rules, d.rule)
		c.sets = append(c.sets, d.set)
		if o := policy.ParseOwner(rule.Comment); o != (policy.Owner{}) {
			c.owner = o
		}
	}
	return nil
}

func (r *reading) jump(handle uint64, d decoded) {
	j := jump{handle: handle, rule: d.rule, set: d.set}
	if name, ours := masqChainOf(d.target); ours && d.rule.Verdict == policy.Jump {
		j.target = name
	} else {
		r.alien("chain %s: %s", baseChain, d.rule)
	}
	r.table.jumps = append(r.table.jumps, j)
}

// set returns the addresses in a set that a rule names, each set read once. It
// returns nil for one that is not as we make it.
func (r *reading) set(name string) (policy.Ranges, error) {
	if ranges, known := r.table.sets[name]; known {
		return ranges, nil
	}
	s, err := r.conn.Set(r.link, tableName, name)
	if err != nil {
		return nil, err
	}
	elements, err := r.conn.Elements(r.link, tableName, name)
	if err != nil {
		return nil, err
	}
	r.seen++
	r.table.sets[name] = nil
	read, err := s.Ranges(elements)
	switch {
	case !s.Plain():
		r.alien("set %s has %s", policy.Quote(name), s.Traits())
		return nil, nil
	case err != nil:
		r.alien("%v", err)
		return nil, nil
	}
	ranges := make(policy.Ranges, len(read))
	for i, x := range read {
		ranges[i] = netipx.IPRangeFrom(x.First, x.Last)
	}
	r.table.sets[name] = ranges
	return ranges, nil
}

// rest finds what no rule told of.
func (r *reading) rest() error {
	if r.seen == r.use {
		return nil
	}
	chains, err := r.conn.Chains(r.link, tableName)
	if err != nil {
		return err
	}
	sets, err := r.conn.Sets(r.link, tableName)
	if err != nil {
		return err
	}
	for _, c := range chains {
		name, ours := masqChainOf(c.Name)
		if c.Name == baseChain || ours && r.table.chains[name] != nil {
			continue
		}
		if ours && c.Base == nil { // emptied, and no jump leads there
			r.table.chains[name] = &chain{}
			continue
		}
		r.table.broken = r.table.broken || c.Base != nil
		r.table.strayChains = append(r.table.strayChains, c.Name)
		r.alien("chain %s", policy.Quote(c.Name))
	}
	for _, s := range sets {
		if _, known := r.table.sets[s.Name]; !known {
			if !anonymous(s.Name) {
				r.table.straySets = append(r.table.straySets, s.Name)
			}
			r.table.sets[s.Name] = nil
			r.alien("set %s", policy.Quote(s.Name))
		}
	}
	if uint32(len(chains)+len(sets)) != r.use {
		r.table.broken = true
		r.alien("an object that is neither a chain nor a set")
	}
	slices.Sort(r.table.strayChains)
	return nil
}
