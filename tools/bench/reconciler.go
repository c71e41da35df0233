// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// reconciledNode is a node with rules and a reconciler.
type reconciledNode struct {
	*scene.Node
	reconciler *scene.Reconciler
}

// newReconciledNode makes a node with n prefixes and a reconciler. It writes the agent file first, if
// there is one.
func newReconciledNode(f scene.Backend, prefixes int, agents string, args ...string) (g reconciledNode, err error) {
	if g.Node, err = scene.NewNode(f); err != nil {
		return g, err
	}
	if agents != "" {
		err = g.AgentFile(agents)
	}
	if err = errors.Join(err, g.Enforce(scene.Policy{Prefixes: scene.Prefixes(prefixes)})); err == nil {
		g.reconciler, err = g.StartReconciler(args...)
	}
	return g, err
}

func (g reconciledNode) close() error {
	var err error
	if g.reconciler != nil {
		err = g.reconciler.Stop()
	}
	if g.Node != nil {
		err = errors.Join(err, g.Close())
	}
	return err
}

// usage is the difference of two readings of a reconciler and its node.
type usage struct {
	cpu          time.Duration
	memory, peak int64 // bytes
	logged       int64 // bytes
	files        int   // files changed
	commits      uint32
}

// usageDuring reads the usage before and after a function.
func (g reconciledNode) usageDuring(run func() error) (s usage, err error) {
	read := func() (u scene.Usage, stamps scene.Stamps, generation uint32, err error) {
		if u, err = g.reconciler.Usage(); err == nil {
			stamps, err = g.Stamps()
		}
		if err == nil {
			generation, err = g.Generation()
		}
		return u, stamps, generation, err
	}
	before, stamps, first, err := read()
	if err != nil {
		return s, err
	}
	if err := run(); err != nil {
		return s, err
	}
	after, now, end, err := read()
	return usage{after.CPU - before.CPU, after.Memory, after.Peak, after.Logged - before.Logged, stamps.Changed(now), end - first}, err
}

// usage writes the usage, with the processor time of one of so many operations.
func (b *bench) usage(benchmark string, u usage, operations int) error {
	return measure.WriteLine(&b.results, benchmark, processor(u.cpu/time.Duration(operations)), measure.Value{Cost: float64(u.commits), Unit: "commits"},
		measure.Value{Cost: float64(u.files), Unit: "changed-files"}, measure.Value{Cost: float64(u.logged), Unit: "logged-bytes"},
		measure.Value{Cost: float64(u.memory), Unit: "rss-bytes"}, measure.Value{Cost: float64(u.peak), Unit: "peak-bytes"})
}

// idle measures a node without changes: a sync each second instead of each minute. The cost is that of a
// sync.
func (b *bench) idle() error {
	syncs := 60
	if b.quick {
		syncs = 10
	}
	results := make([]usage, len(scene.Backends()))
	errs := make([]error, len(results))
	var all sync.WaitGroup
	for i, f := range scene.Backends() {
		all.Go(func() {
			g, err := newReconciledNode(f, usual, agentFile(0), "--resync-interval", "1s")
			if err == nil {
				time.Sleep(time.Second) // for the commits of its start
				results[i], err = g.usageDuring(func() error { time.Sleep(time.Duration(syncs) * time.Second); return nil })
			}
			errs[i] = errors.Join(err, g.close())
		})
	}
	all.Wait()
	for i, f := range scene.Backends() {
		errs = append(errs, b.usage("Idle/backend="+f.Name, results[i], syncs))
	}
	return errors.Join(errs...)
}

// besideReconciler measures on nodes of each backend with notifications, and with a large list, that have a
// reconciler.
func (b *bench) besideReconciler(measure func(f scene.Backend, prefixes int, g reconciledNode) error) error {
	for _, f := range scene.Backends()[:2] {
		for _, prefixes := range b.sizes(usual, 10_000) {
			g, err := newReconciledNode(f, prefixes, "", "--resync-interval", "10m")
			if err == nil {
				time.Sleep(time.Second) // for the syncs of its start
				err = measure(f, prefixes, g)
			}
			if err = errors.Join(err, g.close()); err != nil {
				return err
			}
		}
	}
	return nil
}

// published measures ADD with rules in sync beside a reconciler, which publishes what it verified, alone and after
// another program's commit.
func (b *bench) published(f scene.Backend, prefixes int, g reconciledNode) error {
	var contenders []measure.Contender
	for _, v := range []verifier{
		{"plugin=empty", empty, g.Node, false},
		{"plugin=empty" + afterCommit, empty, g.Node, true},
		{"plugin=" + ipMasqOn(f), ipMasq, g.Node, false},
		{"plugin=" + ipMasqOn(f) + afterCommit, ipMasq, g.Node, true},
	} {
		contenders = append(contenders, v.alone())
	}
	_, err := b.compare(fmt.Sprintf("PublishedADD/prefixes=%d", prefixes), b.limit(200, 10*time.Second), contenders...)
	return err
}

// commits measures the cost of other programs' commits, which do not concern the rules of ip-masq, for
// the reconciler, which receives each event, and for those programs: without a listener, with one that
// ignores the events, and with a reconciler.
func (b *bench) commits(f scene.Backend, prefixes int, g reconciledNode) (err error) {
	const each, large = 500, 5 // commits a round
	limit := measure.Limit{Rounds: 20, Least: 20}
	if b.quick {
		limit = measure.Limit{Rounds: 4, Least: 4}
	}
	contender := func(name string, n *scene.Node) measure.Contender {
		return measure.Contender{Name: "listener=" + name, Run: func(int) ([]measure.Value, error) {
			took, err := n.CommitMany(each, 0)
			return []measure.Value{wall(took)}, err
		}}
	}
	var plain []*scene.Node
	defer func() {
		for _, n := range plain {
			err = errors.Join(err, n.Close())
		}
	}()
	for range 2 {
		n, err := scene.NewNode(f)
		if err != nil {
			return err
		}
		plain = append(plain, n)
		if err := n.Enforce(scene.Policy{Prefixes: scene.Prefixes(prefixes)}); err != nil {
			return err
		}
	}
	watcher, err := plain[1].Listen()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, watcher.Close()) }()
	name, made := fmt.Sprintf("/prefixes=%d/backend=%s", prefixes, f.Name), each*(limit.Rounds+1)
	u, err := g.usageDuring(func() error {
		_, err := b.compare("ThirdPartyCommit"+name, limit, contender("none", plain[0]), contender("idle", plain[1]), contender("reconciler", g.Node))
		return err
	})
	if err == nil && watcher.Count() < made/2 {
		err = fmt.Errorf("the listener received %d of %d commits", watcher.Count(), made)
	}
	errs := []error{err, b.usage("ThirdPartyCommitReconciler"+name+"/commit=small", u, made)}
	for commit, run := range map[string]func() error{
		"paced": func() error { // each wakes the reconciler up
			_, err := g.CommitMany(each, 10*time.Millisecond)
			return err
		},
		"kube-proxy": func() error {
			for range large {
				if err := g.AddKubeProxy(); err != nil {
					return err
				}
			}
			return nil
		},
	} {
		u, err := g.usageDuring(run)
		made := map[string]int{"paced": each, "kube-proxy": large}[commit]
		errs = append(errs, err, b.usage("ThirdPartyCommitReconciler"+name+"/commit="+commit, u, made))
	}
	return errors.Join(errs...)
}
