// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// backend keeps chains in one variant of iptables.
type backend struct {
	choice   netfilter.Choice
	programs *programs
	link     *link
	terse    bool
}

// Layout implements netfilter.Backend: one prefix a rule.
func (b *backend) Layout() policy.Layout { return policy.Layout{PlainPorts: b.choice.PlainPorts} }

// Exclusive implements netfilter.Backend: table nat is everybody's.
func (b *backend) OwnsTables() bool { return false }

// Observe implements netfilter.Backend. A rule that cannot be read from the
// kernel directly is looked at once more as iptables shows it, if that is
// there; it becomes an alien where this does not help.
func (b *backend) Observe(ctx context.Context, chains []netfilter.ChainRef) (netfilter.Observation, error) {
	var rs policy.Ruleset
	var errs []error
	for _, f := range policy.Families() {
		names := namesOf(f, chains)
		if len(names) == 0 {
			continue
		}
		t, err := b.read(ctx, f, names)
		if err != nil {
			errs = append(errs, fmt.Errorf("observe %s of %s: %w", f, b.choice, err))
			continue
		}
		rs.Chains = append(rs.Chains, t.chains(f, names)...)
		if t.fault != "" {
			rs.Unrecognized = append(rs.Unrecognized, policy.UnrecognizedObject{Family: f, Text: t.fault})
		}
	}
	return netfilter.Observation{Rules: rs}, errors.Join(errs...)
}

func namesOf(f policy.Family, chains []netfilter.ChainRef) []string {
	var names []string
	for _, c := range chains {
		if c.Family == f && !slices.Contains(names, c.Name) {
			names = append(names, c.Name)
		}
	}
	return names
}

// read reads POSTROUTING and the named chains: from the kernel and, where that
// fails, as iptables shows them.
func (b *backend) read(ctx context.Context, f policy.Family, names []string) (table, error) {
	t, err := b.readKernel(f, names)
	if err != nil {
		shown, errText := b.readText(ctx, f, names)
		if errText != nil {
			err = errors.Join(err, errText)
		} else {
			err = nil
		}
		return shown, err
	}
	if !t.legible(names, b.terse) {
		t = b.explained(ctx, f, names, t)
	}
	return t, nil
}

// explained adds to entries that could not be read what iptables makes of them.
// Without it the aliens among them are aliens all the same, and have a text, if
// a poorer one.
func (b *backend) explained(ctx context.Context, f policy.Family, names []string, t table) table {
	shown, err := b.readText(ctx, f, names)
	if err != nil {
		return t
	}
	if merged, same := merge(t, shown, names); same {
		return merged
	}
	return t
}

// readKernel reads without running a program.
func (b *backend) readKernel(f policy.Family, names []string) (table, error) {
	if b.choice.Variant == netfilter.VariantNFT {
		return b.link.read(f, names)
	}
	used, err := legacyInUse(f, natTable)
	if err != nil || !used {
		return table{}, err
	}
	raw, err := readBlob(f, natTable)
	if err != nil {
		return table{}, err
	}
	return raw.chains(names)
}

// readText reads what iptables shows.
func (b *backend) readText(ctx context.Context, f policy.Family, names []string) (table, error) {
	if b.choice.Variant == netfilter.VariantLegacy {
		// To ask for a table that is not in use would make it.
		if used, err := legacyInUse(f, natTable); err != nil || !used {
			return table{}, err
		}
	}
	o, err := b.programs.open(ctx, f, b.choice.Variant)
	if err != nil {
		return table{}, err
	}
	t := table{entries: map[string][]entry{}}
	for _, name := range append([]string{postrouting}, names...) {
		lines, err := o.list(ctx, name, name != postrouting)
		if err != nil {
			return table{}, err
		}
		listed, err := parseListing(lines)
		if err != nil {
			return table{}, fmt.Errorf("run %s -t %s -S %s: %w", o.path, natTable, name, err)
		}
		if entries, there := listed[name]; there {
			t.entries[name] = entries
		}
		if name == postrouting && slices.Contains(lines, "-P "+postrouting+" DROP") {
			t.fault = policyFault(f)
		}
	}
	return t, nil
}

// merge adds to the entries read from the kernel how iptables shows them, and
// takes its word for those that are unsure. It returns false where the two were
// read at different times and do not go together.
func merge(kernel, shown table, names []string) (table, bool) {
	out := table{entries: map[string][]entry{}, fault: kernel.fault}
	for _, chain := range append([]string{postrouting}, names...) {
		entries, there := kernel.entries[chain]
		texts, thereToo := shown.entries[chain]
		if there != thereToo || len(entries) != len(texts) {
			return table{}, false
		}
		if !there {
			continue
		}
		out.entries[chain] = []entry{}
		for i, e := range entries {
			ours := slices.Contains(names, e.target)
			if ours != slices.Contains(names, texts[i].target) || ours && e.target != texts[i].target {
				return table{}, false
			}
			if ours || chain != postrouting {
				var same bool
				if e, same = e.merged(texts[i]); !same {
					return table{}, false
				}
			}
			out.entries[chain] = append(out.entries[chain], e)
		}
	}
	return out, true
}

// merged is merge for one entry.
func (e entry) merged(shown entry) (entry, bool) {
	alien := e.rule.Verdict == policy.Unrecognized
	switch {
	case !alien && shown.rule.Verdict != policy.Unrecognized && !e.rule.Equal(shown.rule):
		return entry{}, false
	case e.unsure:
		shown.rule.Connections = e.rule.Connections
		return shown, true
	case alien && shown.rule.Verdict != policy.Unrecognized:
		e.rule.Text = shown.text + " (and what iptables does not show: " + e.rule.Text + ")"
	case alien:
		e.rule.Text = shown.text
	}
	e.text = shown.text
	return e, true
}
