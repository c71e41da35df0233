// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"encoding/binary"
	"iter"
	"slices"
)

// place is where an entry of a blob is, and its target. A node's table may have
// tens of thousands of entries, of which a dozen are ours: those alone are read.
type place struct{ at, target, next int }

// parts is a blob that was taken apart into its entries.
type parts struct {
	blob
	layout layout
	places []place
}

// parts takes the blob apart.
func (b blob) parts() (parts, error) {
	p := parts{blob: b, layout: layoutOf(b.family)}
	if len(b.info) != infoSize {
		return p, errBlob
	}
	// The kernel says how many there are; what it says is not relied upon.
	entries := int(binary.NativeEndian.Uint32(b.info[infoEntries:]))
	p.places = make([]place, 0, min(entries, len(b.entries)/p.layout.size))
	for at := 0; at < len(b.entries); {
		e := b.entries[at:]
		if len(e) < p.layout.size {
			return p, errBlob
		}
		target, next := int(binary.NativeEndian.Uint16(e[p.layout.targetAt:])), int(binary.NativeEndian.Uint16(e[p.layout.nextAt:]))
		if target < p.layout.size || next < target || next > len(e) {
			return p, errBlob
		}
		if _, err := extensionSize(e[target:next]); err != nil {
			return p, err
		}
		p.places = append(p.places, place{at, at + target, at + next})
		at += next
	}
	return p, nil
}

// record returns the ith entry.
func (p parts) record(i int) record {
	at := p.places[i]
	// The size was verified when the blob was taken apart.
	target, _, _ := parseExtension(p.entries[at.target:at.next])
	return record{at.at, p.entries[at.at : at.at+p.layout.size], p.entries[at.at+p.layout.size : at.target], target, at.next}
}

// chainName returns the name of the chain that begins after the ith entry, if
// one does or if the table ends there: both have the target ERROR.
func (p parts) chainName(i int) ([]byte, bool) {
	x := p.entries[p.places[i].target:p.places[i].next]
	if !bytes.HasPrefix(x[nameAt:nameEnd], []byte("ERROR\x00")) {
		return nil, false
	}
	size := int(binary.NativeEndian.Uint16(x))
	name, _, _ := bytes.Cut(x[extensionHead:size], []byte{0})
	return name, true
}

// chainAt returns the chain whose first rule is at the offset: jumps lead there.
func (p parts) chainAt(offset int) (string, bool) {
	i, found := slices.BinarySearchFunc(p.places, offset, func(at place, offset int) int { return at.next - offset })
	if !found || i+1 == len(p.places) {
		return "", false
	}
	name, begins := p.chainName(i)
	return string(name), begins
}

// section is a chain of a blob: its rules from one entry up to another, without
// what iptables itself adds to their end.
type section struct {
	chain     []byte
	builtIn   bool
	from, end int
}

// sections yields the chains.
//
// A built-in chain begins at its hook's offset and ends with its policy, at the
// hook's underflow. A chain of a user begins after an entry with the target
// ERROR, which holds its name, and ends with a rule that iptables itself adds;
// jumps lead to the offset of its first rule. One more such entry ends the table.
func (p parts) sections() iter.Seq[section] {
	at := func(offset int) (int, bool) {
		return slices.BinarySearchFunc(p.places, offset, func(at place, offset int) int { return at.at - offset })
	}
	return func(yield func(section) bool) {
		for hook, chain := range builtInChains() {
			first, begins := at(p.offset(infoHooks, hook))
			policyAt, ends := at(p.offset(infoHooks+4*numHooks, hook))
			there := begins && ends && first <= policyAt // else the table has no chain at the hook
			if there && !yield(section{[]byte(chain), true, first, policyAt}) {
				return
			}
		}
		under := section{from: -1} // the chain that we are in
		for i := range p.places {
			name, begins := p.chainName(i)
			if !begins {
				continue
			}
			under.end = max(i-1, under.from)
			if under.from >= 0 && !yield(under) {
				return
			}
			under = section{chain: name, from: i + 1, end: i + 1}
		}
		if under.from >= 0 && under.from < len(p.places) {
			yield(under) // the table does not end as it should: nothing is known of this chain's end
		}
	}
}

// rules yields the rules of a chain.
func (p parts) rules(s section) iter.Seq[record] {
	return func(yield func(record) bool) {
		for i := s.from; i < s.end; i++ {
			if !yield(p.record(i)) {
				return
			}
		}
	}
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
	p, err := b.parts()
	if err != nil {
		return table{}, err
	}
	t := table{entries: map[string][]entry{}}
	for s := range p.sections() {
		named := func(name string) bool { return name == string(s.chain) }
		if s.builtIn && !named(postrouting) || !s.builtIn && !slices.ContainsFunc(names, named) {
			continue
		}
		entries := make([]entry, 0, s.end-s.from)
		for r := range p.rules(s) {
			entries = append(entries, r.entry(p))
		}
		t.entries[string(s.chain)] = entries
		if s.builtIn {
			if verdict, _ := p.record(s.end).verdict(); verdict == verdictDrop {
				t.fault = policyFault(b.family)
			}
		}
	}
	return t, nil
}

// userChains returns the names of the chains that are not built in.
func (b blob) userChains() ([]string, error) {
	p, err := b.parts()
	if err != nil {
		return nil, err
	}
	var names []string
	for s := range p.sections() {
		if !s.builtIn {
			names = append(names, string(s.chain))
		}
	}
	return names, nil
}
