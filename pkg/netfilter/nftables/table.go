// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	tableName   = "ip-masq"
	baseChain   = "postrouting"
	chainPrefix = "masq-" // because nft cannot parse every bare name: 10, ip or set
)

// baseHook returns the hook of the base chain:
//
//	type nat hook postrouting priority 101; policy accept;
func baseHook() nfnetlink.Base {
	const priority = 101
	return nfnetlink.Base{Type: "nat", Hook: unix.NF_INET_POST_ROUTING, Priority: priority, Policy: nfnetlink.Accept}
}

// The kinds of sets, which begin their names.
const (
	exemptSet = "exempt" // destinations
	sourceSet = "source" // sources that are never masqueraded
	scopeSet  = "scope"  // sources in scope
)

// table is an owned table as it was read.
type table struct {
	exists bool
	baseOK bool // the base chain exists, with the hook that it should have
	broken bool // has something that can only be removed with the table
	jumps  []rule
	chains map[string]*chain // by the name of the masquerade chain
	// sets has the elements of each set; nil is for a set that differs from what AddSet creates.
	sets         map[string]policy.Ranges
	otherChains  []string // chains that are neither the base chain nor masquerade chains
	unrecognized []string // what should not be there, for people
}

// chain is a masquerade chain.
type chain struct {
	rules []rule
	owner policy.Owner
}

// rule is a rule of a chain in a table.
type rule struct {
	policy.Rule
	set    string // that it matches addresses with
	target string // masquerade chain that the rule jumps to, or "" (decode sets the chain's name in the table)
	handle uint64
}

// jumpsTo returns the jumps to a masquerade chain.
func (t *table) jumpsTo(name string) []rule {
	var jumps []rule
	for _, j := range t.jumps {
		if j.target == name {
			jumps = append(jumps, j)
		}
	}
	return jumps
}

// ruleset returns the table in the terms of policy.
func (t *table) ruleset(f policy.Family) policy.Ruleset {
	rules := func(list []rule) (out []policy.Rule) {
		for _, r := range list {
			out = append(out, r.Rule)
		}
		return out
	}
	var rs policy.Ruleset
	for name, c := range t.chains {
		rs.Chains = append(rs.Chains, policy.Chain{
			Family: f, Name: name, Jumps: rules(t.jumpsTo(name)), Rules: rules(c.rules), Owner: c.owner,
		})
	}
	for _, text := range t.unrecognized {
		rs.Unrecognized = append(rs.Unrecognized, policy.UnrecognizedObject{Family: f, Text: text})
	}
	return rs
}

// masqChainOf returns the name of the masquerade chain that a chain of the table is.
func masqChainOf(name string) (string, bool) { return strings.CutPrefix(name, chainPrefix) }

// setName returns a name for a set of a masquerade chain. A set that replaces another one has a number
// above 1 at its end, because both exist for a moment.
func setName(kind, masqChain string, number int) string {
	name := kind + "-" + masqChain
	if number > 1 {
		name += "." + strconv.Itoa(number)
	}
	return name
}

// ownSet reports whether a set has a name as setName returns.
func ownSet(name string) bool {
	kind, _, _ := strings.Cut(name, "-")
	return kind == exemptSet || kind == sourceSet || kind == scopeSet
}

// anonymous reports whether a set belongs to a rule and is deleted with it.
func anonymous(set string) bool { return strings.HasPrefix(set, "__") }

// tableReader reads an owned table.
type tableReader struct {
	conn   *nfnetlink.Conn
	family policy.Family
	link   nfnetlink.Family
	*table
	read uint32 // number of the table's objects that were read
}

// readTable reads an owned table: the rules in one dump, and each set that they use in another. The
// other chains and sets are listed only if the kernel counts more objects than that.
func readTable(conn *nfnetlink.Conn, f policy.Family) (*table, error) {
	r := tableReader{conn: conn, family: f, link: headerOf(f).link, table: &table{
		chains: map[string]*chain{}, sets: map[string]policy.Ranges{},
	}}
	found, base, err := conn.TableAndChain(r.link, tableName, baseChain)
	if errors.Is(err, os.ErrNotExist) {
		return r.table, nil
	}
	if err != nil {
		return nil, err
	}
	r.exists = true
	if found.Flags != 0 {
		r.broken = true
		r.report("table has flags %#x (dormant?)", found.Flags)
	}
	if base != nil {
		r.read++
		r.baseOK = base.Base != nil && *base.Base == baseHook()
		if !r.baseOK { // the kernel cannot change a hook
			r.broken = true
			r.report("chain %s is not the base chain that it should be", baseChain)
		}
	}
	if err := r.readRules(); err != nil {
		return nil, err
	}
	if r.read != found.Use {
		if err := r.listRest(found.Use); err != nil {
			return nil, err
		}
	}
	return r.table, nil
}

func (r *tableReader) report(format string, args ...any) {
	r.unrecognized = append(r.unrecognized, fmt.Sprintf(format, args...))
}

func (r *tableReader) readRules() error {
	rules, err := r.conn.Rules(r.link, tableName, "")
	if err != nil {
		return err
	}
	for _, raw := range rules {
		decoded, err := decode(r.family, raw.Exprs, r.readSet)
		if err != nil {
			return err
		}
		decoded.handle = raw.Handle
		if raw.Chain == baseChain {
			var masq bool
			if decoded.target, masq = masqChainOf(decoded.target); !masq {
				decoded.target = ""
				r.report("chain %s: %s", baseChain, decoded.Rule)
			}
			r.jumps = append(r.jumps, decoded)
			continue
		}
		name, masq := masqChainOf(raw.Chain)
		if !masq {
			continue // listRest finds the chain
		}
		if decoded.Verdict == policy.Jump {
			decoded.Rule = unrecognizedRule(raw.Exprs)
		}
		c := r.chains[name]
		if c == nil {
			c = &chain{}
			r.chains[name] = c
			r.read++
		}
		c.rules = append(c.rules, decoded)
		if o := policy.ParseOwner(raw.Comment); o != (policy.Owner{}) {
			c.owner = o
		}
	}
	return nil
}

// readSet returns the elements of a set that a rule uses, or nil if the set differs from what AddSet
// creates. It reads each set once.
func (r *tableReader) readSet(name string) (policy.Ranges, error) {
	if ranges, known := r.sets[name]; known {
		return ranges, nil
	}
	s, ranges, err := r.conn.Ranges(r.link, tableName, name)
	if err != nil && !errors.Is(err, nfnetlink.ErrNotAddresses) {
		return nil, err
	}
	r.read++
	switch deviation := s.Deviation(nfnetlink.AddressRanges(r.link, name)); {
	case deviation != "":
		r.report("set %s has %s", policy.Quote(name), deviation)
		ranges = nil
	case err != nil:
		r.report("%v", err)
	}
	r.sets[name] = ranges
	return ranges, nil
}

// listRest adds the objects that no rule refers to. The table has the given number of objects.
func (r *tableReader) listRest(objects uint32) error {
	chains, err := r.conn.Chains(r.link, tableName)
	if err != nil {
		return err
	}
	sets, err := r.conn.Sets(r.link, tableName)
	if err != nil {
		return err
	}
	for _, c := range chains {
		name, masq := masqChainOf(c.Name)
		switch {
		case c.Name == baseChain || masq && r.chains[name] != nil:
		case masq && c.Base == nil: // a masquerade chain without rules
			r.chains[name] = &chain{}
		default:
			r.broken = r.broken || c.Base != nil
			r.otherChains = append(r.otherChains, c.Name)
			r.report("chain %s", policy.Quote(c.Name))
		}
	}
	for _, s := range sets {
		if _, known := r.sets[s.Name]; known {
			continue
		}
		r.sets[s.Name] = nil
		r.report("set %s", policy.Quote(s.Name))
		if ownSet(s.Name) && s.Deviation(nfnetlink.AddressRanges(r.link, "")) == "" { // after a flush of the rules it can be used again
			if _, ranges, err := r.conn.Ranges(r.link, tableName, s.Name); err == nil {
				r.sets[s.Name] = ranges
			}
		}
	}
	if uint32(len(chains)+len(sets)) != objects {
		r.broken = true
		r.report("an object that is neither a chain nor a set")
	}
	return nil
}
