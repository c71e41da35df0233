// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// The simulated node.
const (
	fullNode  = 250 // pods
	perSecond = 10  // pods that are replaced
)

// agentPrefixes is the number of prefixes in the agent file.
const agentPrefixes = 20

// churn simulates a full node whose pods are replaced: first alone, and then while another program
// commits before each ADD and DEL, as kube-proxy does when pods start and stop, and the agent file changes
// every second. The empty plugin runs right after ip-masq, for the same pod.
func (b *bench) churn() error {
	for _, f := range scene.Backends()[:2] {
		if err := b.churnOf(f); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) churnOf(f scene.Backend) (err error) {
	long := 15 * time.Second
	if b.quick {
		long = 4 * time.Second
	}
	g, err := newReconciledNode(f, usual, agentFile(0), "--resync-interval", "60s")
	defer func() { err = errors.Join(err, g.close()) }()
	if err != nil {
		return err
	}
	n := g.Node
	for range fullNode {
		if _, err := n.Add(ipMasq, n.NextPod()); err != nil {
			return err
		}
	}
	time.Sleep(time.Second) // for the syncs after the ADDs
	for _, disturbed := range []bool{false, true} {
		name := fmt.Sprintf("/backend=%s/disturbed=%t", f.Name, disturbed)
		thirdParty, changes := 0, 0
		start := time.Now()
		u, err := g.usageDuring(func() error {
			defer time.Sleep(time.Second / 2) // for the commits of the last change
			return b.replace("Churn"+name, n, long, func() error {
				if disturbed {
					thirdParty++
					return n.Commit()
				}
				return nil
			}, func() error {
				if !disturbed || time.Since(start) < time.Duration(changes)*time.Second {
					return nil
				}
				changes++
				return n.AgentFile(agentFile(changes))
			})
		})
		if err != nil {
			return err
		}
		u.commits -= uint32(thirdParty)
		// The operation is a second.
		if err := b.usage("ChurnReconciler"+name, u, int(time.Since(start).Seconds())); err != nil {
			return err
		}
	}
	return nil
}

// agentFile returns the agent file after this number of changes.
func agentFile(changes int) string {
	var b strings.Builder
	b.WriteString("nonMasqueradeCIDRs:\n")
	for i := range agentPrefixes {
		fmt.Fprintf(&b, "- 100.%d.%d.0/24\n", 64+i, changes%250)
	}
	return b.String()
}

// replace replaces a pod every tenth of a second: a DEL and an ADD of ip-masq, with before called before
// each, and then of the empty plugin. It calls after after each pod.
func (b *bench) replace(benchmark string, n *scene.Node, d time.Duration, before, after func() error) error {
	tick := time.NewTicker(time.Second / perSecond)
	defer tick.Stop()
	for start := time.Now(); time.Since(start) < d; <-tick.C {
		pod := n.NextPod()
		for _, plugin := range []string{ipMasq, empty} {
			var cpu time.Duration
			var costs []measure.Value
			for _, verb := range []string{"DEL", "ADD"} {
				if plugin == ipMasq {
					if err := before(); err != nil {
						return err
					}
				}
				took, err := n.Run(scene.Request{Plugin: plugin, Verb: verb, Container: pod})
				if err != nil {
					return err
				}
				cpu += took.CPU
				costs = append(costs, measure.Value{Cost: float64(took.Wall), Unit: verb + "-ns/op"})
			}
			if err := measure.WriteLine(&b.results, benchmark+"/plugin="+strings.TrimPrefix(plugin, "plugin-"), append(costs, processor(cpu))...); err != nil {
				return err
			}
		}
		if err := after(); err != nil {
			return err
		}
	}
	return nil
}
