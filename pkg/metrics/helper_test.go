// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

var (
	agentFiles = policy.SourceID{Kind: policy.AgentFiles}
	iptables   = netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantNFT}
	nftables   = netfilter.Choice{Backend: policy.NFTables}
)

func network(name string) policy.SourceID { return policy.SourceID{Kind: policy.Network, Name: name} }

var prefixes = policytest.Prefixes

func source(s policy.SourceID, chain string, exempt ...string) policy.Source {
	c := policy.Source{ID: s, Policy: policy.SourcePolicy{Chain: chain}}
	if exempt != nil {
		c.Policy.NonMasqueradeCIDRs = prefixes(exempt...)
	}
	return c
}

// inSync returns the state of rules that are as desired, whose counters are
// 1, 2, 3 and so on.
func inSync(choice netfilter.Choice, sources ...policy.Source) *enforce.State {
	return &enforce.State{Chains: chainsIn(choice, policy.Merge(sources))}
}

func chainsIn(choice netfilter.Choice, policies []policy.Policy) (chains []enforce.Chain) {
	n := uint64(0)
	for _, p := range policies {
		desired := func() policy.Ruleset {
			layout := policy.Layout{Sets: choice.Backend == policy.NFTables}
			return policy.Desired([]policy.Policy{p}, layout, policy.OwnedBy("/var/lib/cni/ip-masq"))
		}
		chain := enforce.Chain{Policy: p, Choice: choice, Recorded: true, Desired: desired(), Observed: desired()}
		for _, c := range chain.Observed.Chains {
			for i := range c.Rules {
				n++
				c.Rules[i].Connections = n
			}
		}
		chains = append(chains, chain)
	}
	return chains
}

// guards returns the state of guards that are as desired, whose counters have the value.
func guards(policies []policy.Policy, packets uint64, inactive ...enforce.Inactive) enforce.GuardState {
	g := enforce.GuardState{Desired: policy.DesiredGuards(policies, policy.Owner{}), Inactive: inactive}
	g.Observed.Packets, g.Observed.Guards = map[policy.ChainFamily]uint64{}, g.Desired
	for _, d := range g.Desired {
		g.Observed.Packets[policy.ChainFamily{Chain: d.Chain, Family: d.Family}] = packets
	}
	return g
}

// rich returns the report of a node on which much is going on.
func rich() *reconcile.Report {
	bridge := source(network("bridge"), "IP-MASQ-AGENT", "10.0.0.0/8", "fd00::/8")
	bridge.Policy.EnableIPv6, bridge.Policy.Guard, bridge.Policy.PodCIDRs = new(true), policy.GuardDrop, prefixes("10.244.0.0/16")
	agent := source(agentFiles, "IP-MASQ-AGENT", "192.168.0.0/16")
	agent.Policy.MasqueradeCIDRs = prefixes("10.0.0.0/8", "10.9.0.0/16")
	odd := source(network("odd \"näme\"\n"+strings.Repeat("x", 100)), "SECOND", "172.16.0.0/12")
	all := []policy.Source{agent, bridge, odd}
	merged := policy.Merge(all)
	conflict := func(key, inForce, superseded string) error {
		return &policy.ConflictError{
			Chain: "SECOND", InForceValue: inForce, SupersededValue: superseded,
			InForce: policy.Origin{Source: odd.ID, Key: key, Index: -1}, Superseded: policy.Origin{Source: network("late"), Key: key, Index: -1},
		}
	}
	return &reconcile.Report{
		Started: time.Unix(1_700_000_000, 0), Took: 3500 * time.Microsecond, Result: reconcile.Repaired,
		Problems: []reconcile.Problem{
			{Reason: reconcile.ReasonSource, Source: agentFiles, Err: errors.New("/etc/config/ip-masq-agent:\nnonMasqueradeCIDRs[0]: is null")},
			{Reason: reconcile.ReasonSource, Source: network("late"), Err: errors.Join(conflict("toPorts", "empty", "1-2"), conflict("randomFully", "true", "false"))},
			{Reason: reconcile.ReasonConflict, Chain: "IP-MASQ-AGENT", Err: merged[0].Conflicts[0]},
		},
		Sources: &reconcile.Sources{ConfDir: config.ConfDir{Conflists: []config.Conflist{
			{File: "/etc/cni/net.d/10-bridge.conflist", Network: "bridge", Entries: []config.ConflistEntry{{Index: 1}}},
		}}},
		State: store.State{Sources: all},
		Rules: &enforce.State{
			Chains: append(chainsIn(nftables, merged[:1]), chainsIn(iptables, merged[1:])...),
			Guard:  guards(merged, 11, enforce.Inactive{ChainFamily: policy.ChainFamily{Chain: "IP-MASQ-AGENT", Family: policy.IPv6}, Err: errors.New("no ranges")}),
		},
		Drift: policy.Diff{{Kind: policy.RuleChange}, {Kind: policy.RuleChange}, {Kind: policy.JumpChange}},
	}
}

// newMonitor returns a Monitor whose options read nothing, except those that are given.
func newMonitor(o metrics.Options) *metrics.Monitor {
	if o.State == nil {
		o.State = func(context.Context) *enforce.State { return nil }
	}
	if o.ThirdParty == nil {
		o.ThirdParty = func(*reconcile.Report) (int, error) { return 0, errors.New("no rules") }
	}
	if o.Conntrack == nil {
		o.Conntrack = func(context.Context) (conntrack.Stats, error) { return conntrack.Stats{}, errors.New("no conntrack") }
	}
	if o.Record == nil {
		o.Record = func() (store.Record, error) { return store.Record{}, nil }
	}
	if o.PluginVersion == nil {
		o.PluginVersion = func() string { return "" }
	}
	if o.Written == nil {
		o.Written = func(policy.SourceID) (time.Time, error) { return time.Time{}, nil }
	}
	return metrics.New(o)
}

// get returns what a handler answers.
func get(h http.Handler, path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w
}

// scrape returns the samples of /metrics by their name and labels, as they are
// written there. It complains about what is not the text format, and about what
// promlint does not like.
func scrape(t *testing.T, m *metrics.Monitor) map[string]string {
	t.Helper()
	w := get(m.Metrics(), "/metrics")
	if w.Code != http.StatusOK {
		t.Fatalf("/metrics answers %d: %s", w.Code, w.Body)
	}
	text := w.Body.String()
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v %v\n%s", problems, err, text)
	}
	return samples(text)
}

// samples returns the samples of a text of /metrics.
func samples(text string) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(text) {
		if i := strings.LastIndexByte(line, ' '); !strings.HasPrefix(line, "#") {
			all[line[:i]] = strings.TrimSpace(line[i:])
		}
	}
	return all
}

// expect checks some samples; "" is for one that is not there.
func expect(t *testing.T, m *metrics.Monitor, want map[string]string) {
	t.Helper()
	got := scrape(t, m)
	for sample, value := range want {
		assert.Equal(t, fmt.Sprintf("ip_masq_%s", sample), got["ip_masq_"+sample], value)
	}
}

// failing fails the test when something is logged.
type failing struct{ *testing.T }

func (f failing) Write(line []byte) (int, error) {
	f.Errorf("the log has %s", line)
	return len(line), nil
}

func missing() *reconcile.Sources {
	return &reconcile.Sources{ConfDirErr: fs.ErrNotExist}
}
