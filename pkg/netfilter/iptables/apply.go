// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Apply implements netfilter.Backend. A family that fails does not keep the
// other from being written.
func (b *backend) Apply(ctx context.Context, desired policy.Ruleset, _ netfilter.Observation, held *os.File) error {
	var errs []error
	for _, f := range policy.Families() {
		var chains []policy.Chain
		var names []string
		for _, c := range desired.Chains {
			if c.Family == f {
				chains = append(chains, c)
				names = append(names, c.Name)
			}
		}
		if len(chains) == 0 {
			continue
		}
		err := b.write(ctx, f, held, func() (*transaction, error) { return b.plan(ctx, f, chains, names) })
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

// write runs the planned transaction, if it does anything. It plans and runs
// again where others wrote in between: they held the lock, or the rules that
// the plan was about are not those that stand there.
func (b *backend) write(ctx context.Context, f policy.Family, held *os.File, plan func() (*transaction, error)) error {
	const tries = 6
	start := time.Now()
	pause := 5 * time.Millisecond
	var last error
	var input []byte
	for range tries {
		if time.Since(start) > lockSeconds*time.Second {
			break // the program itself has waited for the lock
		}
		tx, err := plan()
		if err == nil && tx.empty() {
			return nil
		}
		if err == nil {
			before := input
			input = tx.restore()
			if last != nil && !isPassing(last) && bytes.Equal(input, before) {
				return last
			}
			err = b.restore(ctx, f, input, held)
		} else if !isPassing(err) {
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
	o, err := b.programs.open(ctx, f, b.choice.Variant)
	if err != nil {
		return unusable(b.choice, err)
	}
	return o.restore(ctx, input, held)
}

// errTorn tells that the rules changed while they were read.
var errTorn = errors.New("the rules change while they are read; see which program rewrites them")

func isPassing(err error) bool {
	var failed *runError
	if errors.As(err, &failed) {
		// iptables-legacy-restore does not say why the kernel refused the whole.
		return passing(failed.stderr) || failed.line == "COMMIT"
	}
	return errors.Is(err, errTorn)
}

// plan returns what makes the kernel have exactly the chains.
func (b *backend) plan(ctx context.Context, f policy.Family, chains []policy.Chain, names []string) (*transaction, error) {
	t, err := b.read(ctx, f, names)
	if err != nil {
		return nil, err
	}
	if t.fault != "" {
		return nil, errors.New(t.fault)
	}
	var tx transaction
	var wanting []policy.Chain // with jumps that have to be taken away
	observed := policy.Ruleset{Chains: t.chains(f, names)}
	for i := range chains {
		want := &chains[i]
		have := observed.Find(f, want.Name)
		if have == nil {
			have = &policy.Chain{}
			tx.fill(want)
		} else if want.Owner != have.Owner || !slices.EqualFunc(want.Rules, have.Rules, policy.Rule.Equal) {
			tx.fill(want)
		}
		missing, surplus := policy.Unmatched(want.Jumps, have.Jumps)
		if len(surplus) > 0 {
			wanting = append(wanting, *want)
		}
		for _, j := range missing {
			tx.appendJump(j, want.Name)
		}
	}
	if len(wanting) == 0 {
		return &tx, nil
	}
	lines, err := b.jumpLines(ctx, f, t, names)
	if err != nil {
		return nil, err
	}
	for _, want := range wanting {
		_, surplus := policy.Unmatched(want.Jumps, t.jumps(want.Name))
		for _, i := range surplus {
			tx.deleteJump(lines[want.Name][i])
		}
	}
	return &tx, nil
}

// jumpLines returns the jumps to each chain as iptables shows them, in the order
// in which the table has them.
func (b *backend) jumpLines(ctx context.Context, f policy.Family, t table, names []string) (map[string][]string, error) {
	shown, err := b.readText(ctx, f, names)
	if err != nil {
		return nil, err
	}
	merged, same := merge(t, shown, names)
	if !same {
		return nil, errTorn
	}
	lines := map[string][]string{}
	for _, e := range merged.entries[postrouting] {
		if slices.Contains(names, e.target) && strings.Contains(e.text, "\n") {
			// iptables-restore would read its second line as a command.
			return nil, fmt.Errorf("delete the jump %s: iptables-restore cannot take a comment with a line feed; delete it with iptables -D",
				policy.Quote(e.text))
		}
		lines[e.target] = append(lines[e.target], e.text)
	}
	return lines, nil
}

// planRemoval returns what takes the chains away that are there.
func (b *backend) planRemoval(ctx context.Context, f policy.Family, names []string) (*transaction, error) {
	t, err := b.readKernel(f, names)
	if err != nil {
		if t, err = b.readText(ctx, f, names); err != nil {
			return nil, err
		}
	}
	var tx transaction
	var lines map[string][]string
	for _, name := range names {
		if _, there := t.entries[name]; !there {
			continue
		}
		tx.delete(name)
		if len(t.jumps(name)) > 0 && lines == nil {
			if lines, err = b.jumpLines(ctx, f, t, names); err != nil {
				return nil, err
			}
		}
		for _, line := range lines[name] {
			tx.deleteJump(line)
		}
	}
	return &tx, nil
}

// referrers returns an error that names the rules elsewhere that lead to one of
// the chains: nobody can remove it while there are such. It is asked after a
// failure, and what stands in its own way is no news then.
func (b *backend) referrers(ctx context.Context, f policy.Family, names []string) error {
	t, _ := b.listing(ctx, f)
	var errs []error
	for _, chain := range slices.Sorted(maps.Keys(t)) {
		for _, e := range t[chain] {
			if chain != postrouting && slices.Contains(names, e.target) {
				errs = append(errs, fmt.Errorf("chain %s is still used by %s; remove that rule first", e.target, policy.Quote(e.text)))
			}
		}
	}
	return errors.Join(errs...)
}

// listing reads all of table nat as iptables shows it.
func (b *backend) listing(ctx context.Context, f policy.Family) (map[string][]entry, error) {
	o, err := b.programs.open(ctx, f, b.choice.Variant)
	if err != nil {
		return nil, err
	}
	out, err := run(ctx, b.programs.env, nil, nil, o.path, "-t", natTable, "-S")
	if err != nil {
		return nil, err
	}
	return parseListing(strings.Split(string(out), "\n"))
}
