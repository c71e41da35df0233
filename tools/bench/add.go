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

const (
	ipMasq      = "ip-masq"
	empty       = "plugin-empty"
	usual       = 64 // prefixes
	afterCommit = "-after-commit"
)

// stage has nodes of every backend, with and without third-party rules.
type stage struct {
	bare, full []*scene.Node // by backend
}

func newStage() (s *stage, err error) {
	s = &stage{}
	for _, f := range scene.Backends() {
		for _, where := range []*[]*scene.Node{&s.bare, &s.full} {
			n, err := scene.NewNode(f)
			if err != nil {
				return nil, errors.Join(err, s.close())
			}
			*where = append(*where, n)
		}
		if err := s.full[len(s.full)-1].AddKubeProxy(); err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	return s, nil
}

func (s *stage) all() []*scene.Node { return append(append([]*scene.Node{}, s.bare...), s.full...) }

// enforce applies a policy on all nodes.
func (s *stage) enforce(p scene.Policy) error {
	for _, n := range s.all() {
		if err := n.Enforce(p); err != nil {
			return err
		}
	}
	return nil
}

func (s *stage) close() error {
	var errs []error
	for _, n := range s.all() {
		errs = append(errs, n.Close())
	}
	return errors.Join(errs...)
}

// verifier is a plugin on a node.
type verifier struct {
	name, program string
	node          *scene.Node
	disturbed     bool // another program commits before each run
}

// disturb commits a third-party rule if the verifier is disturbed.
func (v verifier) disturb() error {
	if !v.disturbed {
		return nil
	}
	return v.node.Commit()
}

// verifiers returns the empty plugin, ip-masq with each backend, and then the alternatives: on nodes
// without third-party rules, and on nodes with them. The empty plugin runs twice, as a measure of noise.
func (s *stage) verifiers(alternatives bool) (all []verifier) {
	for i, nodes := range [][]*scene.Node{s.bare, s.full} {
		add := func(name, program string, n *scene.Node, disturbed bool) {
			all = append(all, verifier{fmt.Sprintf("rules=%d/plugin=%s", i*scene.KubeProxyRules, name), program, n, disturbed})
		}
		add("empty", empty, nodes[0], false)
		add("empty-again", empty, nodes[0], false)
		for _, n := range nodes {
			add(ipMasqOn(n.Backend), ipMasq, n, false)
			if n.Backend.Variant != "legacy" {
				add(ipMasqOn(n.Backend)+afterCommit, ipMasq, n, true)
			}
		}
		if !alternatives {
			continue
		}
		for _, n := range nodes[1:] {
			add("iptables-S-"+n.Backend.Variant, "plugin-iptables-s", n, false)
			add("go-iptables-"+n.Backend.Variant, "plugin-go-iptables", n, false)
		}
		add("legacy-table", "plugin-legacy-table", nodes[len(nodes)-1], false)
	}
	return all
}

// ipMasqOn returns the name of ip-masq with a backend.
func ipMasqOn(f scene.Backend) string { return "ip-masq-" + f.Name }

// alone runs the verifier once a round.
func (v verifier) alone() measure.Contender {
	return measure.Contender{Name: v.name, Run: func(int) ([]measure.Value, error) {
		if err := v.disturb(); err != nil {
			return nil, err
		}
		took, err := v.node.Add(v.program, v.node.NextPod())
		return []measure.Value{wall(took.Wall), processor(took.CPU)}, err
	}}
}

// setting is a policy for measuring ADDs.
type setting struct {
	prefixes int
	policy   scene.Policy
}

func (s setting) name() string {
	families := 1
	if s.policy.IPv6 {
		families = 2
	}
	return fmt.Sprintf("prefixes=%d/families=%d", s.prefixes, families)
}

func (s setting) usual() bool { return s.prefixes == usual && !s.policy.IPv6 }

func (b *bench) settings() []setting {
	var all []setting
	for _, n := range b.sizes(4, usual, 1000, 10_000) {
		all = append(all, setting{n, scene.Policy{Prefixes: scene.Prefixes(n)}})
	}
	for _, n := range b.sizes(usual, 1000) {
		all = append(all, setting{n, scene.Policy{Prefixes: scene.DualStack(n), IPv6: true}})
	}
	return all
}

// add measures ADD with rules in sync.
func (b *bench) add() (err error) {
	s, err := newStage()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	var lines []chart.Line
	for i, at := range b.settings() {
		if err := s.enforce(at.policy); err != nil {
			return err
		}
		most := 10 * time.Second
		if at.usual() {
			most = 40 * time.Second // the budgets use these figures
		}
		all := s.verifiers(true)
		var contenders []measure.Contender
		for _, v := range all {
			contenders = append(contenders, v.alone())
		}
		f, err := b.compare("ADD/"+at.name(), b.limit(200, most), contenders...)
		if err != nil {
			return err
		}
		if at.policy.IPv6 {
			continue
		}
		for j, v := range all[:len(all)/2] { // without third-party rules
			if i == 0 {
				lines = append(lines, chart.Line{Name: v.name[len("rules=0/plugin="):]})
			}
			lines[j].Add(at.prefixes, f.Of(v.name), 1e6)
		}
	}
	b.pictures["add.svg"], err = chart.Lines("ADD with rules in sync", "prefixes", "ms", lines)
	return err
}
