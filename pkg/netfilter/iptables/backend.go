// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

type backend struct {
	choice   netfilter.Choice
	programs *programs
	reader
}

// Layout implements netfilter.Backend: one prefix per rule.
func (b *backend) Layout() policy.Layout { return policy.Layout{} }

// Supported implements netfilter.Backend. Each iptables-nft has --random-fully.
func (b *backend) Supported(ctx context.Context) (policy.Layout, error) {
	l := b.Layout()
	if b.choice.Variant != netfilter.VariantLegacy {
		return l, nil
	}
	since162, err := b.programs.since162(ctx, policy.IPv4, b.choice.Variant)
	l.NoRandomFully = err == nil && !since162
	return l, err
}

// OwnsTables implements netfilter.Backend: every program on the node uses table nat.
func (b *backend) OwnsTables() bool { return false }

// CanWrite implements netfilter.Backend: is there a program, and do rules in POSTROUTING work?
func (b *backend) CanWrite(ctx context.Context, f policy.Family) error {
	if _, err := b.programs.locate(ctx, f, b.choice.Variant, "-restore"); err != nil {
		return unusable(b.choice, err)
	}
	if t, err := b.read(f, nil); err == nil { // Observe reports what cannot be read
		return t.writable()
	}
	return nil
}

// CheckWrite implements netfilter.Backend. It applies the rules of the families that differ in a
// network namespace that it creates: only iptables-restore tells what it needs. Without the
// privilege for one it returns nil.
func (b *backend) CheckWrite(ctx context.Context, desired policy.Ruleset, _ netfilter.Observation) error {
	var differing []policy.Chain
	for _, f := range policy.Families() {
		chains := netfilter.ChainsOf(desired, f)
		if len(chains) == 0 {
			continue
		}
		tx, err := b.plan(ctx, f, chains, false)
		if err != nil {
			return err
		}
		if tx.empty() {
			continue
		}
		differing = append(differing, chains...)
		if err := b.seesTable(ctx, f); err != nil {
			return err
		}
	}
	if len(differing) == 0 {
		return nil
	}
	scratch, err := ns.TempNetNS()
	if err != nil {
		return nil
	}
	defer func() { _ = scratch.Close() }()
	var refused error
	err = scratch.Do(func(ns.NetNS) error {
		refused = b.writeThere(ctx, differing)
		return nil
	})
	if err != nil {
		return nil
	}
	return refused
}

// seesTable returns why the program cannot list POSTROUTING of table nat, if the kernel has it: iptables-nft
// refuses a chain in which nft wrote rules that it cannot print. The chains in a namespace of its own do not tell.
func (b *backend) seesTable(ctx context.Context, f policy.Family) error {
	chains, err := b.chainNames(f, Table, postrouting)
	if err != nil || len(chains) == 0 {
		return err
	}
	exists, err := b.programs.hasChain(ctx, f, b.choice.Variant, postrouting)
	if err == nil && !exists {
		table := netfilter.LinkOf(f).String() + " " + Table
		err = fmt.Errorf("%s does not show chain %s of table %s, which the kernel has; "+
			"see: nft list table %s", baseName(f), postrouting, table, table)
	}
	if err != nil {
		return unusable(b.choice, unusableIfRefused(b.reader, f, nil, err))
	}
	return nil
}

// CanList implements netfilter.Backend. People list the whole table, which iptables-nft refuses if one of its
// chains has an expression of nft that no rule of iptables has. Chains with other rules can be listed, and written,
// by their names all the same.
func (b *backend) CanList(ctx context.Context, f policy.Family) error {
	if b.choice.Variant == netfilter.VariantLegacy {
		return nil
	}
	chains, err := b.chainNames(f, Table, "")
	if err != nil {
		return readError(err)
	}
	if len(chains) == 0 {
		return nil
	}
	err = b.programs.listAll(ctx, f, b.choice.Variant)
	if err != nil {
		return unusable(b.choice, unusableIfRefused(b.reader, f, nil, err))
	}
	return nil
}

// writeThere writes chains in the network namespace of the calling thread.
func (b *backend) writeThere(ctx context.Context, chains []policy.Chain) error {
	there := *b
	if b.choice.Variant == netfilter.VariantNFT {
		nft := &nftReader{}
		defer func() { _ = nft.conn.Close() }() // nothing was written through it
		there.reader = nft
	}
	return there.write(ctx, chains, false, nil)
}

// Observe implements netfilter.Backend. It runs a program only to print a chain that another
// program seems to have written.
func (b *backend) Observe(ctx context.Context, chains []policy.ChainFamily) (netfilter.Observation, error) {
	var rs policy.Ruleset
	var errs []error
	for _, f := range policy.Families() {
		names := namesOf(f, chains)
		if len(names) == 0 {
			continue
		}
		t, err := b.read(f, names)
		if err != nil {
			errs = append(errs, fmt.Errorf("observe %s of %s: %w", f, b.choice, err))
			continue
		}
		for i := range t.Chains {
			b.addPrinted(ctx, &t.Chains[i], t.targets)
		}
		rs.Chains = append(rs.Chains, t.Chains...)
		if t.fault != "" {
			rs.Unrecognized = append(rs.Unrecognized, policy.UnrecognizedObject{Family: f, Text: t.fault})
		}
	}
	return netfilter.Observation{Rules: rs}, errors.Join(errs...)
}

// addPrinted adds the rules of a chain, and the jumps to it, as iptables prints them, if neither ip-masq nor an agent
// has written it. The rules of POSTROUTING lead to these targets.
func (b *backend) addPrinted(ctx context.Context, c *policy.Chain, targets []string) {
	if c.Owner != (policy.Owner{}) || c.IsOfAgents() {
		return
	}
	lines, err := b.programs.list(ctx, c.Family, b.choice.Variant, c.Name)
	if err == nil {
		c.Printed = lines
	}
	lines, err = b.programs.list(ctx, c.Family, b.choice.Variant, postrouting)
	if err != nil || len(lines) != len(targets) { // another program changed them meanwhile
		return
	}
	for i, target := range targets {
		if target == c.Name {
			jump := policy.PrintedJump{From: postrouting, Number: i + 1, Text: lines[i]}
			c.PrintedJumps = append(c.PrintedJumps, jump)
		}
	}
}

func namesOf(f policy.Family, chains []policy.ChainFamily) []string {
	var names []string
	for _, c := range chains {
		if c.Family == f && !slices.Contains(names, c.Chain) {
			names = append(names, c.Chain)
		}
	}
	return names
}

// Apply implements netfilter.Backend. It reads the rules again right before it writes: nothing
// makes iptables-restore fail if they have changed since the observation.
func (b *backend) Apply(
	ctx context.Context, desired policy.Ruleset, _ netfilter.Observation, held *os.File,
) error {
	return b.write(ctx, desired.Chains, false, held)
}

// Remove implements netfilter.Backend. It leaves an empty table nat of iptables-legacy, which another
// program may use by then.
func (b *backend) Remove(ctx context.Context, refs []policy.ChainFamily, held *os.File) error {
	var chains []policy.Chain
	for _, f := range policy.Families() {
		for _, name := range namesOf(f, refs) {
			chains = append(chains, policy.Chain{Family: f, Name: name})
		}
	}
	return b.write(ctx, chains, true, held)
}

// write applies or removes chains, also of one family if the other fails, unless the program hangs.
func (b *backend) write(ctx context.Context, chains []policy.Chain, remove bool, held *os.File) error {
	var errs []error
	for _, f := range policy.Families() {
		own := netfilter.ChainsOf(policy.Ruleset{Chains: chains}, f)
		if len(own) == 0 {
			continue
		}
		if err := b.writeFamily(ctx, f, own, remove, held); err != nil {
			what := "write"
			if remove {
				what = "remove"
			}
			errs = append(errs, fmt.Errorf("%s %s rules of %s: %w", what, f, b.choice, err))
			if errors.Is(err, errHangs) {
				break
			}
		}
	}
	return errors.Join(errs...)
}

// writeFamily plans a transaction and runs it, if it does anything. If that fails it plans and runs
// again: other programs write at the same time, and iptables-legacy-restore does not print why the
// kernel refused. An obstacle in the table would be there again.
func (b *backend) writeFamily(
	ctx context.Context, f policy.Family, chains []policy.Chain, remove bool, held *os.File,
) error {
	const tries = 6
	start := time.Now()
	pause := 5 * time.Millisecond
	mayHaveFailedBefore := false // by accident
	for try := 1; ; try++ {
		err := b.planAndWrite(ctx, f, chains, remove, held)
		if err == nil {
			return nil
		}
		_, isObstacle := errors.AsType[obstacle](err)
		if isObstacle || errors.Is(err, errHangs) {
			return err
		}
		if errors.Is(err, fs.ErrNotExist) { // locate found no program
			return unusable(b.choice, err)
		}
		if mayHaveFailedBefore && mayBeAccident(err) {
			return unusable(b.choice, secondInARow(err))
		}
		mayHaveFailedBefore = mayBeAccident(err)
		// iptables-legacy-restore itself waits for the lock.
		hasWaited := time.Since(start) > lockSeconds*time.Second
		if try == tries || hasWaited {
			return unusableIfRefused(b.reader, f, chains, err)
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
			pause *= 2
		}
	}
}

func (b *backend) planAndWrite(
	ctx context.Context, f policy.Family, chains []policy.Chain, remove bool, held *os.File,
) error {
	tx, err := b.plan(ctx, f, chains, remove)
	if err != nil || tx.empty() {
		return err
	}
	return b.programs.restore(ctx, f, b.choice.Variant, held, tx.restore())
}

// change is what a transaction does about one chain.
type change struct {
	want    *policy.Chain
	missing []policy.Rule // jumps
	surplus []int         // the numbers of jumps that are to be deleted
}

// plan returns the transaction after which the kernel has exactly the chains or, to remove, none.
func (b *backend) plan(
	ctx context.Context, f policy.Family, chains []policy.Chain, remove bool,
) (*transaction, error) {
	names := otherHooks()
	for _, c := range chains {
		names = append(names, c.Name)
	}
	t, err := b.read(f, names)
	if err != nil {
		return nil, readError(err)
	}
	if t.fault != "" && !remove {
		return nil, t.writable()
	}
	var tx transaction
	var changes []change
	isSurplus := false
	for i := range chains {
		want, have := &chains[i], t.Find(f, chains[i].Name)
		if have == nil && remove {
			continue
		}
		if remove {
			tx.remove(want.Name)
		} else if !sameRules(want, have) {
			tx.fill(want)
		}
		missing, surplus := pairJumps(f, want, have)
		changes = append(changes, change{want, missing, surplus})
		isSurplus = isSurplus || len(surplus) > 0
	}
	var lines map[string][]string // of POSTROUTING, by the chain that they lead to
	if isSurplus {
		lines, err = b.jumpLines(ctx, f, t)
		if err != nil {
			return nil, err
		}
	}
	for _, c := range changes {
		if err := tx.deleteJumps(lines[c.want.Name], c.surplus); err != nil {
			return nil, err
		}
		tx.appendJumps(c.missing, c.want.Name)
	}
	if !tx.empty() && t.ownerError != nil {
		return nil, obstacle{t.ownerError}
	}
	return &tx, nil
}

func (b *backend) jumpLines(ctx context.Context, f policy.Family, t table) (map[string][]string, error) {
	listed, err := b.programs.list(ctx, f, b.choice.Variant, postrouting)
	if err != nil {
		return nil, err
	}
	return t.jumpLines(listed)
}

// sameRules reports whether a chain exists with the owner and the rules that it must have.
func sameRules(want, have *policy.Chain) bool {
	if have == nil || want.Owner != have.Owner {
		return false
	}
	return slices.EqualFunc(want.Rules, have.Rules, policy.Rule.Equal)
}

// pairJumps returns the jumps to a chain that are missing, and the numbers of those that are to be
// deleted. Of duplicate jumps the last one stays: an agent that runs at the same time appends the
// jump that it looks for.
func pairJumps(f policy.Family, want, have *policy.Chain) (missing []policy.Rule, surplus []int) {
	if have == nil {
		return want.Jumps, nil
	}
	missing, surplus, _ = policy.Pair(want.Jumps, have.Jumps)
	if f != policy.IPv6 || !haveSource(have.Jumps, surplus) {
		return missing, surplus
	}
	// ip6tables-nft 1.8.9 can delete a rule with another prefix length of the same address in place of the one
	// that it is told to delete. So all jumps are deleted and written again, in one transaction.
	surplus = surplus[:0]
	for i := range have.Jumps {
		surplus = append(surplus, i)
	}
	return want.Jumps, surplus
}

// haveSource reports whether one of the jumps with these numbers is for some sources alone.
func haveSource(jumps []policy.Rule, numbers []int) bool {
	for _, i := range numbers {
		if jumps[i].From != nil {
			return true
		}
	}
	return false
}
