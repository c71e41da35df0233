// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
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
	name, plugin string
	node         *scene.Node
	disturbed    bool // another program commits before each run
}

// disturb commits a third-party rule if the verifier is disturbed.
func (v verifier) disturb() error {
	if !v.disturbed {
		return nil
	}
	return v.node.Commit()
}

// verifiers returns all verifying plugins for every backend, the empty plugin first.
func (s *stage) verifiers() []verifier {
	all := []verifier{{name: empty, plugin: "plugin-empty", node: s.bare[0]}, {name: again, plugin: "plugin-empty", node: s.bare[0]}}
	for i, nodes := range [][]*scene.Node{s.bare, s.full} {
		suffix := []string{"", rules}[i]
		for _, n := range nodes[:2] {
			all = append(all, verifier{ipMasqName(n.Backend) + afterCommit + suffix, "ip-masq", n, true})
		}
		for _, n := range nodes {
			all = append(all, verifier{ipMasqName(n.Backend) + suffix, "ip-masq", n, false})
		}
		for _, n := range nodes[1:] {
			all = append(all,
				verifier{"`iptables -S`, " + n.Backend.Variant + suffix, "plugin-iptables-s", n, false},
				verifier{"go-iptables, " + n.Backend.Variant + suffix, "plugin-go-iptables", n, false})
		}
		all = append(all, verifier{tableOnly + suffix, "plugin-legacy-table", nodes[len(nodes)-1], false})
	}
	return all
}

// cost has the resources of a contender's runs, by round.
type cost struct{ cpu, kernel, faults measure.Series }

// alone runs the verifier once a round and adds its resources to costs.
func (v verifier) alone(costs map[string]*cost) measure.Contender {
	c := &cost{}
	costs[v.name] = c
	return measure.Contender{Name: v.name, Run: func(round int) (float64, error) {
		if err := v.disturb(); err != nil {
			return 0, err
		}
		took, err := v.node.Add(v.plugin, v.node.NextPod())
		if round >= 0 {
			c.cpu = append(c.cpu, milliseconds(took.CPU))
			c.kernel = append(c.kernel, milliseconds(took.Kernel))
			c.faults = append(c.faults, float64(took.Faults))
		}
		return milliseconds(took.Wall), err
	}}
}
