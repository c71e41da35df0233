// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chart"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// damage is how often rules of a size are changed in each way: rarely enough that the reconciler
// does not detect flapping and back off.
type damage struct {
	prefixes, times int
	quiet           time.Duration // without a commit, after which a repair is over
}

// repair measures how long changed rules stay unrepaired.
func (b *bench) repair() error {
	const most = 50.0 // ms
	sizes := []damage{{usual, 8, 80 * time.Millisecond}, {1000, 4, 150 * time.Millisecond}, {10_000, 3, 300 * time.Millisecond}}
	if b.quick {
		sizes = []damage{{usual, 3, 80 * time.Millisecond}, {10_000, 1, 500 * time.Millisecond}}
	}
	s := b.report.section("Repair of changed rules")
	s.say("Another program deletes the jump, flushes the chain, or deletes the table, in turn. The time begins right " +
		"before the commit of that program. It ends with the kernel's event of the last commit that repairs the rules. " +
		"CHECK then verifies the rules. The last three columns have the medians for each kind of damage.\n\n" +
		"The agents check their rules every 60 s. The budget is a time and not a ratio, so its verdict depends on the " +
		"machine and its load. The verdict compares the worst repair with the budget.")
	rows := [][]string{{"backend, prefixes", "repairs", "median, ms", "95th percentile, ms", "worst, ms", "agents' interval of 60 s, × the median",
		"jump deleted, ms", "chain flushed, ms", "table deleted, ms"}}
	for _, f := range scene.Backends()[:2] {
		for _, size := range sizes {
			took, err := repairs(f, size)
			if err != nil {
				return err
			}
			name := f.Name + ", " + chart.Thousands(size.prefixes)
			rows = append(rows, []string{name, fmt.Sprint(len(took)), took.String(), measure.Short(took.Quantile(0.95)), measure.Short(took.Quantile(1)),
				chart.Thousands(int(60_000 / took.Median())), medianOfDamage(took, 0), medianOfDamage(took, 1), medianOfDamage(took, 2)})
			if size.prefixes == 1000 {
				continue
			}
			row := budget{fmt.Sprintf("repair of changed rules, %s prefixes, %s", chart.Thousands(size.prefixes), f.Name), "≤ 50 ms",
				fmt.Sprintf("median %s, worst %s ms of %d", measure.Short(took.Median()), measure.Short(took.Quantile(1)), len(took)), plainly(took.Quantile(1) <= most),
				"after a process deletes a table, no process can commit until the kernel has freed it, 8 to 16 ms later; other load on the machine takes the rest."}
			if size.prefixes > usual {
				if row.reason, err = explainRepair(f, size.prefixes); err != nil {
					return err
				}
			}
			b.report.judge(row)
		}
	}
	s.table(rows)
	s.say("The kernel sends no events for iptables-legacy. There the reconciler repairs the rules at its resync " +
		"interval, 60 s by default.")
	return nil
}

// repairs returns the times, in ms, of repairs by a new reconciler.
func repairs(f scene.Backend, size damage) (took measure.Series, err error) {
	g, err := newReconciledNode(f, size.prefixes, "", "--resync-interval", "10m")
	defer func() { err = errors.Join(err, g.close()) }()
	if err != nil {
		return nil, err
	}
	watcher, err := g.Listen()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, watcher.Close()) }()
	for i := range size.times * scene.Damages {
		one, err := g.Repair(watcher, i, size.quiet)
		if err != nil {
			return nil, err
		}
		took = append(took, milliseconds(one))
	}
	return took, nil
}

// medianOfDamage returns the median of the repairs of one change.
func medianOfDamage(took measure.Series, way int) string {
	var of measure.Series
	for i := way; i < len(took); i += scene.Damages {
		of = append(of, took[i])
	}
	return measure.Short(of.Median())
}

// explainRepair returns the parts of the repair of a long list: reading the rules, which takes the
// time of CHECK, and writing them.
func explainRepair(f scene.Backend, prefixes int) (reason string, err error) {
	n, err := scene.NewNode(f)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	p := scene.Policy{Prefixes: scene.Prefixes(prefixes)}
	if err := n.Enforce(p); err != nil {
		return "", err
	}
	read, err := repeatTimed(n.Commit, func() (time.Duration, error) {
		took, err := n.Run(scene.Request{Plugin: "ip-masq", Verb: "CHECK", Container: n.NextPod()})
		return took.Wall, err
	})
	if err != nil {
		return "", err
	}
	how := "with `iptables-restore`, as the agents do,"
	again := feedTimed(n, func() string { return scene.AgentScript(p.Prefixes) }, "iptables-restore", "--noflush")
	if f.Kind == "nftables" {
		how = "in a process that has the parsed list"
		r, err := n.Rebuilder(p)
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, r.Close()) }()
		again = r.Apply
	}
	write, err := repeatTimed(n.Wipe, again)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("the reconciler reads the rules twice before a repair, the second time under the lock. Each time it compares "+
		"them with the desired rules. Then the kernel commits. On this machine one read, by CHECK, took %s ms, and "+
		"creating all rules %s took %s ms.", read, how, write), nil
}

// repeatTimed returns the times of a function in ms. The calls of before are not timed.
func repeatTimed(before func() error, timed func() (time.Duration, error)) (all measure.Series, err error) {
	const times = 5
	for range times {
		if err := before(); err != nil {
			return nil, err
		}
		took, err := timed()
		if err != nil {
			return nil, err
		}
		all = append(all, milliseconds(took))
	}
	return all, nil
}
