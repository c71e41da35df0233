// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
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
func baseHook() nfnetlink.Base { return postrouting("nat", 101) }

func postrouting(chainType string, priority int32) nfnetlink.Base {
	return nfnetlink.Base{Type: chainType, Hook: unix.NF_INET_POST_ROUTING, Priority: priority, Policy: nfnetlink.Accept}
}

// The kinds of sets, which begin their names.
const (
	exemptSet = "exempt" // destinations
	sourceSet = "source" // sources that are never masqueraded
	scopeSet  = "scope"  // sources in scope
)

// tableObjects is what the tables with masquerade chains and those with guards have in common.
type tableObjects struct {
	exists bool
	broken bool // has something that can only be removed with the table
	// sets has the elements of each set; nil is for a set of another form than an owned one.
	sets         map[string]policy.Ranges
	unrecognized []string // what should not be there, for people
}

// table is an owned table with masquerade chains as it was read.
type table struct {
	tableObjects
	baseOK      bool // the base chain exists, with the hook that it should have
	jumps       []rule
	chains      map[string]*chain // by the name of the masquerade chain
	otherChains []string          // chains that are neither the base chain nor masquerade chains
}

// chain is a masquerade chain.
type chain struct {
	rules []rule
	owner policy.Owner
}

// rule is a rule of a chain in a table.
type rule struct {
	netfilter.DecodedRule        // a jump has the masquerade chain as its Target, or "" (decode sets the chain's name in the table)
	set                   string // that it matches addresses with
	handle                uint64
}

// jumpsTo returns the jumps to a masquerade chain.
func (t *table) jumpsTo(name string) []rule {
	var jumps []rule
	for _, j := range t.jumps {
		if j.Target == name {
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

// objectReader reads the header and the sets of an owned table.
type objectReader struct {
	conn   *nfnetlink.Conn
	family policy.Family
	link   nfnetlink.Family
	name   string // of the table
	found  *tableObjects
	read   uint32 // number of the table's objects that were read
}

func newObjectReader(conn *nfnetlink.Conn, f policy.Family, name string, found *tableObjects) objectReader {
	found.sets = map[string]policy.Ranges{}
	return objectReader{conn: conn, family: f, link: headerOf(f).link, name: name, found: found}
}

func (r *objectReader) report(format string, args ...any) {
	r.found.unrecognized = append(r.found.unrecognized, fmt.Sprintf(format, args...))
}

// header reads the table and one of its base chains, if they exist, and reports whether the chain has the
// hook that it should have. The table has the returned number of objects.
func (r *objectReader) header(base string, want nfnetlink.Base) (objects uint32, baseOK bool, err error) {
	t, chain, err := r.conn.TableAndChain(r.link, r.name, base)
	if errors.Is(err, os.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	r.found.exists = true
	if t.Flags != 0 {
		r.found.broken = true
		r.report("table has flags %#x (dormant?)", t.Flags)
	}
	if chain != nil {
		r.read++
		baseOK = r.checkBase(*chain, want)
	}
	return t.Use, baseOK, nil
}

// checkBase reports whether a chain has the hook that it should have, which the kernel cannot change.
func (r *objectReader) checkBase(c nfnetlink.Chain, want nfnetlink.Base) bool {
	if c.Base != nil && *c.Base == want {
		return true
	}
	r.found.broken = true
	r.report("chain %s is not the base chain that it should be", c.Name)
	return false
}

// readSet returns the elements of a set, or nil if its form is not the given one, the name's. It reads each
// set once, and no elements of one that rules fill.
func (r *objectReader) readSet(form nfnetlink.Set) (policy.Ranges, error) {
	name := form.Name
	if ranges, known := r.found.sets[name]; known {
		return ranges, nil
	}
	var s nfnetlink.Set
	var err error
	ranges := policy.Ranges{}
	if form.Timeout == 0 {
		s, ranges, err = r.conn.Ranges(r.link, r.name, name)
	} else {
		s, err = r.conn.Set(r.link, r.name, name)
	}
	if err != nil && !errors.Is(err, nfnetlink.ErrNotAddresses) {
		return nil, err
	}
	r.read++
	switch deviation := s.Deviation(form); {
	case deviation != "":
		r.report("set %s has %s", policy.Quote(name), deviation)
		ranges = nil
	case err != nil:
		r.report("%v", err)
	}
	r.found.sets[name] = ranges
	return ranges, nil
}

// rest lists the chains and sets of the table, which has the given number of objects.
func (r *objectReader) rest(objects uint32) (chains []nfnetlink.Chain, sets []nfnetlink.Set, err error) {
	if chains, err = r.conn.Chains(r.link, r.name); err != nil {
		return nil, nil, err
	}
	if sets, err = r.conn.Sets(r.link, r.name); err != nil {
		return nil, nil, err
	}
	if uint32(len(chains)+len(sets)) != objects {
		r.found.broken = true
		r.report("an object that is neither a chain nor a set")
	}
	return chains, sets, nil
}

// tableReader reads an owned table with masquerade chains.
type tableReader struct {
	objectReader
	*table
}

// readTable reads an owned table: the rules in one dump, and each set that they use in another. The
// other chains and sets are listed only if the kernel counts more objects than that.
func readTable(conn *nfnetlink.Conn, f policy.Family) (*table, error) {
	t := &table{chains: map[string]*chain{}}
	r := tableReader{newObjectReader(conn, f, tableName, &t.tableObjects), t}
	objects, baseOK, err := r.header(baseChain, baseHook())
	if err != nil || !t.exists {
		return t, err
	}
	t.baseOK = baseOK
	if err := r.readRules(); err != nil {
		return nil, err
	}
	if r.read != objects {
		if err := r.listRest(objects); err != nil {
			return nil, err
		}
	}
	return t, nil
}

func (r *tableReader) readRules() error {
	rules, err := r.conn.Rules(r.link, tableName, "")
	if err != nil {
		return err
	}
	for _, raw := range rules {
		decoded, err := decode(r.family, raw, func(set string) (policy.Ranges, error) {
			return r.readSet(nfnetlink.AddressRanges(r.link, set))
		})
		if err != nil {
			return err
		}
		if raw.Chain == baseChain {
			var masq bool
			if decoded.Target, masq = masqChainOf(decoded.Target); !masq {
				decoded.Target = ""
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
			decoded.Unrecognize()
		}
		c := r.chains[name]
		if c == nil {
			c = &chain{}
			r.chains[name] = c
			r.read++
		}
		c.rules = append(c.rules, decoded)
		if decoded.Owner != (policy.Owner{}) {
			c.owner = decoded.Owner
		}
	}
	return nil
}

// listRest adds the objects that no rule refers to. The table has the given number of objects.
func (r *tableReader) listRest(objects uint32) error {
	chains, sets, err := r.rest(objects)
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
	return nil
}
