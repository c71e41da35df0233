// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"encoding/binary"
	"errors"
	"slices"
)

// section is a chain of a blob: its rules, without what iptables itself adds to
// their end.
type section struct {
	chain   string
	builtIn bool
	rules   []record
}

// sections takes the blob apart into its chains, and returns where chains that
// can be jumped to begin, by the offset of their first rule.
//
// A built-in chain begins at its hook's offset and ends with its policy, at the
// hook's underflow. A chain of a user begins after an entry with the target
// ERROR, which holds its name, and ends with a rule that iptables itself adds;
// jumps lead to the offset of its first rule. One more such entry ends the table.
func (b blob) sections() ([]section, map[int]string, error) {
	records, err := b.records(layoutOf(b.family))
	if err != nil || len(b.info) != infoSize {
		return nil, nil, errors.Join(err, errBlobUnless(len(b.info) == infoSize))
	}
	at := func(offset int) (int, bool) {
		return slices.BinarySearchFunc(records, offset, func(r record, offset int) int { return r.at - offset })
	}
	var all []section
	for hook, chain := range builtInChains() {
		first, begins := at(b.offset(infoHooks, hook))
		policyAt, ends := at(b.offset(infoHooks+4*numHooks, hook))
		if begins && ends && first <= policyAt { // else the table has no chain at the hook
			all = append(all, section{chain, true, records[first:policyAt]})
		}
	}
	starts := map[int]string{}
	from := -1 // where the rules of the chain begin that we are in
	for i, r := range records {
		if r.target.name != "ERROR" {
			continue
		}
		if from >= 0 && from < i {
			all[len(all)-1].rules = records[from : i-1]
		}
		if i+1 < len(records) {
			from = i + 1
			starts[records[from].at] = cString(r.target.info)
			all = append(all, section{chain: cString(r.target.info)})
		}
	}
	return all, starts, nil
}

// offset returns one of the offsets in the info, which are by hook.
func (b blob) offset(table, hook int) int {
	return int(binary.NativeEndian.Uint32(b.info[table+4*hook:]))
}

// builtInChains are the names of the built-in chains by their hook's number.
func builtInChains() [numHooks]string {
	return [numHooks]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", postrouting}
}

// chains returns the entries of POSTROUTING and of the named chains.
func (b blob) chains(names []string) (table, error) {
	sections, starts, err := b.sections()
	if err != nil {
		return nil, err
	}
	t := table{}
	for _, s := range sections {
		if s.builtIn && s.chain != postrouting || !s.builtIn && !slices.Contains(names, s.chain) {
			continue
		}
		t[s.chain] = []entry{}
		for _, r := range s.rules {
			t[s.chain] = append(t[s.chain], r.entry(b.family, layoutOf(b.family), starts))
		}
	}
	return t, nil
}

// userChains returns the names of the chains that are not built in.
func (b blob) userChains() ([]string, error) {
	sections, _, err := b.sections()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, s := range sections {
		if !s.builtIn {
			names = append(names, s.chain)
		}
	}
	return names, nil
}
