// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/agentconfig"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

type fault struct {
	problems []reconcile.Problem
	managed  *conflist.Status
	reasons  string
}

// faults are what a node is not ready for, one at a time, each as the reconciler
// reports it. The alerts are evaluated over what /metrics says of them
// (tools/deploy).
func faults() map[string]fault {
	conflict := &policy.ConflictError{
		Chain: policy.DefaultChain, InForceValue: "true", SupersededValue: "false",
		InForce:    policy.Origin{Source: network("bridge"), Key: "randomFully", Index: -1},
		Superseded: policy.Origin{Source: agentFiles, Key: "randomFully", Index: -1},
	}
	one := func(p reconcile.Problem) []reconcile.Problem { return []reconcile.Problem{p} }
	present := &conflist.Status{Present: true}
	absent := func(topic reconcile.Reason, flapping bool) *conflist.Status {
		return &conflist.Status{Flapping: flapping, Problems: []conflist.Problem{{Reason: string(topic)}}}
	}
	chain := func(topic reconcile.Reason, err error) []reconcile.Problem {
		return one(reconcile.Problem{Reason: topic, Chain: policy.DefaultChain, Err: err})
	}
	return map[string]fault{
		"sound":               {nil, present, ""}, // the others are compared with it
		"unknown-key":         {nil, present, ""},
		"rules":               {chain(reconcile.ReasonRules, errors.New("rules differ")), present, "rules"},
		"state":               {one(reconcile.Problem{Reason: reconcile.ReasonState, Source: agentFiles, Err: errors.New("no space left on device")}), present, "state"},
		"source":              {one(reconcile.Problem{Reason: reconcile.ReasonSource, Source: agentFiles, Err: errors.New("nonMasqueradeCIDRs[0]: is null")}), present, "source"},
		"settings":            {one(reconcile.Problem{Reason: reconcile.ReasonSource, Err: errors.New("settings: reconciler.toml:1: unknown key")}), present, "source"},
		"conflict-superseded": {chain(reconcile.ReasonConflict, conflict), present, "conflict"},
		"conflict-refused":    {one(reconcile.Problem{Reason: reconcile.ReasonConflict, Source: network("late"), Err: fmt.Errorf("network: %w", conflict)}), present, "conflict"},
		"conflict-datadir":    {chain(reconcile.ReasonConflict, errors.New("chain belongs to another dataDir")), present, "conflict"},
		"conflist":            {one(reconcile.Problem{Reason: reconcile.ReasonConflist, Err: errors.New("the entry stands first")}), present, "conflist"},
		"conflist-absent":     {nil, absent(reconcile.ReasonConflist, false), "conflist"},
		"conflist-flapping":   {nil, absent(reconcile.ReasonConflist, true), "conflist"},
		"plugin":              {one(reconcile.Problem{Reason: reconcile.ReasonPlugin, Err: errors.New("no such file")}), present, "plugin"},
		"plugin-absent":       {nil, absent(reconcile.ReasonPlugin, false), "plugin"},
		"backend":             {chain(reconcile.ReasonBackend, fmt.Errorf("find iptables: %w", netfilter.ErrUnusable)), present, "backend"},
		"standby":             {one(reconcile.Problem{Reason: reconcile.ReasonStandby, Err: errors.New("another one runs")}), nil, "standby"},
		"output-address":      {chain(reconcile.ReasonAddress, errors.New("no address of the node is in outputAddresses")), present, "output-address"},
		"flapping":            {one(reconcile.Problem{Reason: reconcile.ReasonFlapping, Err: errors.New("nft reverts the rules")}), present, "flapping"},
	}
}

// TestFaults: each fault has one reason, and is no other's. The file of a fault has the samples that differ from
// those of a sound node, without a value if they are missing.
func TestFaults(t *testing.T) {
	sound := map[string]string{}
	names := slices.Sorted(maps.Keys(faults()))
	first := slices.Index(names, "sound")
	names[0], names[first] = names[first], names[0]
	for _, name := range names {
		f := faults()[name]
		t.Run(name, func(t *testing.T) {
			m := newMonitor(metrics.Options{
				Version:       "v1.2.3",
				ThirdParty:    func(*reconcile.Report) (int, error) { return 0, nil },
				PluginVersion: func() string { return map[bool]string{false: "v1.2.3"}[f.reasons == "plugin"] },
				Conntrack: func(context.Context) (conntrack.Stats, error) {
					return conntrack.Stats{Entries: 1000, Limit: 262144}, nil
				},
				Written: func(policy.SourceID) (time.Time, error) { return time.Unix(1_600_000_000, 0), nil },
			})
			all := []policy.Source{source(network("bridge"), policy.DefaultChain, "10.0.0.0/8"), source(agentFiles, policy.DefaultChain, "192.168.0.0/16")}
			all[0].Policy.Guard, all[0].Policy.PodCIDRs = policy.GuardDrop, prefixes("10.244.0.0/16")
			v := inSync(nftables, all...)
			v.Guard = guards(v.Policies(), 0)
			result := reconcile.Unchanged
			for _, p := range f.problems {
				var conflict *policy.ConflictError
				if errors.As(p.Err, &conflict) && p.Chain != "" {
					v.Chains[0].Policy.Conflicts = append(v.Chains[0].Policy.Conflicts, conflict)
				}
				if p.Reason == reconcile.ReasonRules || p.Reason == reconcile.ReasonState {
					result = reconcile.Failed
				}
			}
			r := &reconcile.Report{
				Started: time.Unix(1_700_000_000, 0), Took: time.Millisecond, Result: result, Problems: f.problems, Rules: v, State: store.State{Sources: all},
				Sources: &reconcile.Sources{ConfDir: config.ConfDir{Conflists: []config.Conflist{{Network: "bridge", Entries: []config.ConflistEntry{{Index: 1}}}}}},
			}
			if name == "unknown-key" {
				r.Sources.Agent = &agentconfig.Files{UnknownKeys: []string{"ip-masq-agent:1: nonMasqueradeCIDR: is not a known key"}}
			}
			if f.managed != nil {
				r.Conflist = f.managed
				for _, p := range f.managed.Problems {
					r.Problems = append(r.Problems, reconcile.Problem{Reason: reconcile.Reason(p.Reason), Err: errors.New("the entry is not there")})
				}
			}
			m.Report(r, time.Minute)
			for _, fault := range reconcile.Faults() {
				reason := string(fault.Reason)
				expect(t, m, map[string]string{`not_ready{reason="` + reason + `"}`: map[bool]string{false: "0", true: "1"}[reason == f.reasons]})
			}
			expect(t, m, map[string]string{"ready": map[bool]string{false: "0", true: "1"}[f.reasons == ""]})
			text := strings.ReplaceAll(get(m.Metrics(), "/metrics").Body.String(), runtime.Version(), "GO")
			if name == "sound" {
				sound = samples(text)
			} else {
				now := samples(text)
				text = ""
				for _, sample := range slices.Sorted(maps.Keys(sound)) {
					if now[sample] != sound[sample] {
						text += strings.TrimSpace(sample+" "+now[sample]) + "\n"
					}
					delete(now, sample)
				}
				for _, sample := range slices.Sorted(maps.Keys(now)) {
					text += sample + " " + now[sample] + "\n"
				}
			}
			golden.Check(t, "testdata/faults/"+name+".prom", text)
		})
	}
}
