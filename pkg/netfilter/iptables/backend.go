// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// backend keeps chains in one variant of iptables.
type backend struct {
	choice     netfilter.Choice
	programs   *programs
	nft        *nftReader
	kernelForm bool
}

// Layout implements netfilter.Backend: one prefix per rule.
func (b *backend) Layout() policy.Layout { return policy.Layout{PlainPorts: b.choice.PlainPorts} }

// OwnsTables implements netfilter.Backend: every program on the node uses table nat.
func (b *backend) OwnsTables() bool { return false }

// CanWrite implements netfilter.Backend. It finds out whether there is a program to
// write with, and whether rules in POSTROUTING have an effect.
func (b *backend) CanWrite(ctx context.Context, f policy.Family) error {
	if _, err := b.programs.locate(ctx, baseName(f), b.choice.Variant, "-restore"); err != nil {
		return unusable(b.choice, err)
	}
	if t, err := b.read(f, nil); err == nil && t.fault != "" { // Observe reports what cannot be read
		return errors.New(t.fault)
	}
	return nil
}

// Observe implements netfilter.Backend.
func (b *backend) Observe(ctx context.Context, chains []netfilter.ChainRef) (netfilter.Observation, error) {
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
		if !b.kernelForm {
			b.showUnrecognized(ctx, f, &t)
		}
		rs.Chains = append(rs.Chains, t.chains...)
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

// read reads POSTROUTING and the named chains from the kernel.
func (b *backend) read(f policy.Family, names []string) (table, error) {
	if b.choice.Variant == netfilter.VariantLegacy {
		return readLegacyNAT(f, names)
	}
	return b.nft.read(f, names)
}

// showUnrecognized gives unrecognized rules the text that `iptables -S` prints. If
// iptables cannot be run, or the rules have changed, they keep the decoder's text.
func (b *backend) showUnrecognized(ctx context.Context, f policy.Family, t *table) {
	show := func(rules []policy.Rule, list func() []string) {
		var lines []string
		for i := range rules {
			r := &rules[i]
			if r.Verdict == policy.Unrecognized && lines == nil {
				if lines = list(); len(lines) != len(rules) {
					return
				}
			}
			if r.Verdict == policy.Unrecognized {
				r.Text = shownText(lines[i], r.Text)
			}
		}
	}
	for i := range t.chains {
		c := &t.chains[i]
		show(c.Rules, func() []string {
			lines, _ := b.list(ctx, f, c.Name)
			return lines
		})
		show(c.Jumps, func() []string {
			jumps, _ := b.listJumps(ctx, f, t)
			return jumps[c.Name]
		})
	}
}

// shownText returns the line of an unrecognized rule, with the decoder's text if
// the line is that of a rule which would have been recognized: `iptables -S` leaves
// out native nf_tables expressions that iptables does not know.
func shownText(line, decoded string) string {
	const options = `( -[sd] [0-9a-f.:]+(/\d+)?| -o \S+| -p (tcp|udp|sctp)| -m comment --comment (\S+|"(\\.|[^"\\])*")` +
		`| -m addrtype( ! --(src|dst)-type LOCAL)+| -m statistic --mode random --probability [\d.]+)*`
	recognized := regexp.MustCompile(`^-A (\S+` + options + ` -j (RETURN|MASQUERADE( --to-ports [\d-]+)?( --random-fully)?)` +
		`|` + postrouting + options + ` -j \S+)$`)
	if !recognized.MatchString(line) {
		return line
	}
	return line + " (and what iptables does not show: " + decoded + ")"
}

// list returns the rules of a chain as `iptables -S` prints them.
func (b *backend) list(ctx context.Context, f policy.Family, chain string) ([]string, error) {
	p, err := b.programs.open(ctx, f, b.choice.Variant)
	if err != nil {
		return nil, err
	}
	return p.list(ctx, chain)
}

// listJumps returns the rules of POSTROUTING that lead to the table's chains, by
// chain, as `iptables -S` prints them.
func (b *backend) listJumps(ctx context.Context, f policy.Family, t *table) (map[string][]string, error) {
	lines, err := b.list(ctx, f, postrouting)
	if err != nil {
		return nil, err
	}
	jumps, ok := t.jumpLines(lines)
	if !ok {
		return nil, errChanging
	}
	return jumps, nil
}

// Apply implements netfilter.Backend. It does not use the observation: nothing
// makes iptables-restore fail if the rules have changed, so Apply reads them again
// right before. If one family fails, the other one is written all the same.
func (b *backend) Apply(ctx context.Context, desired policy.Ruleset, _ netfilter.Observation, held *os.File) error {
	var errs []error
	for _, f := range policy.Families() {
		var chains []policy.Chain
		for _, c := range desired.Chains {
			if c.Family == f {
				chains = append(chains, c)
			}
		}
		if len(chains) == 0 {
			continue
		}
		err := b.write(ctx, f, held, func() (*transaction, error) { return b.plan(ctx, f, chains) })
		if err != nil {
			errs = append(errs, fmt.Errorf("write %s rules of %s: %w", f, b.choice, err))
		}
	}
	return errors.Join(errs...)
}

// Remove implements netfilter.Backend.
func (b *backend) Remove(ctx context.Context, chains []netfilter.ChainRef, held *os.File) error {
	var errs []error
	for _, f := range policy.Families() {
		names := namesOf(f, chains)
		if len(names) == 0 {
			continue
		}
		err := b.write(ctx, f, held, func() (*transaction, error) { return b.planRemoval(ctx, f, names) })
		if err != nil {
			errs = append(errs, fmt.Errorf("remove %s rules of %s: %w", f, b.choice, errors.Join(err, b.referrers(ctx, f, names))))
		}
	}
	return errors.Join(errs...)
}

// errChanging says that `iptables -S` shows other rules than the kernel had just
// before.
var errChanging = errors.New("the rules change while they are read; see which program rewrites them")

// write plans a transaction and runs it, if it does anything. If that fails because
// another program holds the lock or has changed the rules, write plans and runs again.
func (b *backend) write(ctx context.Context, f policy.Family, held *os.File, plan func() (*transaction, error)) error {
	const tries = 6
	start := time.Now()
	pause := 5 * time.Millisecond
	var last error
	var input []byte
	for range tries {
		if time.Since(start) > lockSeconds*time.Second {
			break // iptables-restore itself has waited for the lock
		}
		tx, err := plan()
		switch {
		case err == nil && tx.empty():
			return nil
		case err == nil:
			before := input
			input = tx.restore()
			if last != nil && !isTransient(last) && bytes.Equal(input, before) {
				return last
			}
			err = b.restore(ctx, f, input, held)
		case !isTransient(err):
			return err
		}
		if last = err; last == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return last
		case <-time.After(pause):
			pause *= 2
		}
	}
	return last
}

func (b *backend) restore(ctx context.Context, f policy.Family, input []byte, held *os.File) error {
	p, err := b.programs.open(ctx, f, b.choice.Variant)
	if err != nil {
		return unusable(b.choice, err)
	}
	return p.restore(ctx, input, held)
}

// plan returns the transaction after which the kernel has exactly the chains.
func (b *backend) plan(ctx context.Context, f policy.Family, chains []policy.Chain) (*transaction, error) {
	names := make([]string, len(chains))
	for i, c := range chains {
		names[i] = c.Name
	}
	t, err := b.read(f, names)
	if err != nil {
		return nil, err
	}
	if t.fault != "" {
		return nil, errors.New(t.fault)
	}
	var tx transaction
	var lines map[string][]string // of the jumps
	for i := range chains {
		want, have := &chains[i], t.chain(chains[i].Name)
		if have == nil || want.Owner != have.Owner || !slices.EqualFunc(want.Rules, have.Rules, policy.Rule.Equal) {
			tx.fill(want)
		}
		if have == nil {
			have = &policy.Chain{}
		}
		missing, surplus := policy.Unmatched(want.Jumps, have.Jumps)
		for _, j := range missing {
			tx.appendJump(j, want.Name)
		}
		if len(surplus) > 0 && lines == nil {
			if lines, err = b.listJumps(ctx, f, &t); err != nil {
				return nil, err
			}
		}
		for _, i := range surplus {
			if err := tx.deleteJump(lines[want.Name][i]); err != nil {
				return nil, err
			}
		}
	}
	return &tx, nil
}

// planRemoval returns the transaction that deletes those of the chains that exist,
// and the jumps to them.
func (b *backend) planRemoval(ctx context.Context, f policy.Family, names []string) (*transaction, error) {
	t, err := b.read(f, names)
	if err != nil {
		return nil, err
	}
	var tx transaction
	var lines map[string][]string // of the jumps
	for _, c := range t.chains {
		tx.deleteChain(c.Name)
		if len(c.Jumps) > 0 && lines == nil {
			if lines, err = b.listJumps(ctx, f, &t); err != nil {
				return nil, err
			}
		}
		for _, line := range lines[c.Name] {
			if err := tx.deleteJump(line); err != nil {
				return nil, err
			}
		}
	}
	return &tx, nil
}

// referrers returns an error that names the rules of other chains that lead to one
// of the named chains, which cannot be removed therefore. Failing to find out is no
// error: it is called after a failure.
func (b *backend) referrers(ctx context.Context, f policy.Family, names []string) error {
	var out []byte
	if p, err := b.programs.open(ctx, f, b.choice.Variant); err == nil {
		out, _ = run(ctx, b.programs.env, nil, nil, p.path, "-t", natTable, "-S")
	}
	var errs []error
	for _, line := range ruleLines(strings.Split(string(out), "\n")) {
		for _, name := range names {
			if leadsTo(line, name) && !strings.HasPrefix(line, "-A "+postrouting+" ") {
				errs = append(errs, fmt.Errorf("chain %s is still used by %s; remove that rule first", name, policy.Quote(line)))
			}
		}
	}
	return errors.Join(errs...)
}
