// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

const (
	prefix   = "ip_masq_"
	maxLabel = 63  // bytes in the value of a label
	maxNames = 200 // sources, and chains, that have series
)

// Describe implements prometheus.Collector: without descriptions metrics are checked when collected.
func (m *Monitor) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector. A counter exists from the beginning with each value of its label, as rate()
// does not see the first increase of a series that did not exist.
func (m *Monitor) Collect(out chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := exporter(out)
	e.gauge("build_info", "Information about the version of ip-masq-reconciler and of Go; the value is always 1.",
		"version", "go_version")(1, label(m.options.Version), label(runtime.Version()))

	unready := map[reconcile.Reason]bool{}
	for _, p := range m.unready() {
		unready[p.Reason] = true
	}
	e.gauge("ready", "Whether the rules are what the sources ask for (1) or not (0), as /readyz says.")(boolToFloat(len(unready) == 0))
	notReady := e.gauge("not_ready", "Whether the node is not ready for this reason (1) or not (0).", "reason")
	for _, f := range reconcile.Faults() {
		notReady(boolToFloat(unready[f.Reason]), string(f.Reason))
	}

	results := e.counter("reconciles_total", "Number of syncs, by result.", "result")
	for _, r := range reconcile.Results() {
		results(float64(m.results[r]), string(r))
	}
	e.gauge("last_reconcile_success_timestamp_seconds",
		"Time of the end of the last sync that did not fail, in seconds since 1970; 0 before the first.")(m.success)
	repairs := e.counter("drift_repairs_total",
		"Number of differences that other programs caused in written rules and a sync repaired, by kind.", "kind")
	for _, k := range []policy.ChangeKind{
		policy.ChainChange, policy.JumpChange, policy.RuleChange, policy.OrderChange, policy.ElementChange, policy.UnrecognizedChange,
		policy.GuardChange,
	} {
		repairs(float64(m.repairs[k]), string(k))
	}

	e.counter("conflist_repairs_total",
		"Number of times that the plugin entry was inserted into the conflist (with conflist.manage).")(float64(m.inserted))
	present := entryPresent(m.sources)
	if m.conflist != nil {
		present = &m.conflist.Present
		e.gauge("conflist_flapping", "Whether another program removes the plugin entry from the conflist repeatedly (1) or not (0); "+
			"with conflist.manage only.")(boolToFloat(m.conflist.Flapping))
		differs := func(f conflist.Finding) bool { return f.ID == conflist.EntryDiffers }
		e.gauge("conflist_entry_differs", "Whether the plugin entry differs from conflist.entry_file and was not written by ip-masq (1) or not (0); "+
			"with conflist.manage only.")(boolToFloat(slices.ContainsFunc(m.conflist.Findings, differs)))
	}
	if present != nil {
		e.gauge("conflist_present", "Whether the network that the runtime uses has the plugin entry (1) or not (0). With conflist.manage it "+
			"is the network that conflist.network names, if it names one.")(boolToFloat(*present))
	}

	if m.thirdParty != nil {
		e.gauge("foreign_rules", "Number of third-party rules that defeat the policy; doctor names them.")(float64(*m.thirdParty))
	}
	if m.plugin != "" {
		e.gauge("plugin_info", "Information about the version of the installed CNI plugin; the value is always 1.", "version")(1, label(m.plugin))
	}
	collect(m.connections.sums, 3, e.counter("connections_total",
		"Number of connections that the rules of the chain decided about, as the kernel counted their first packets.",
		"chain", "family", "action"))
	collect(m.guards.sums, 3, e.counter("guard_packets_total", "Number of packets of pods that should have been masqueraded and were not, "+
		"by what the guard did with them (count, drop).", "chain", "family", "action"))
	if m.lastWithRules != nil {
		m.guardKeys(e, m.lastWithRules.Rules)
	}
	collect(m.resets.sums, 2, e.counter("connections_reset_total", "Number of connections that were reset because the policy changed their verdict, "+
		"or because they should have been masqueraded and were not.", "chain", "family"))
	e.counter("connection_reset_failures_total", "Number of times that connections could not be reset; "+
		"it is tried again.")(float64(m.resetFailures))
	if s := m.conntrack; s != nil {
		e.gauge("conntrack_entries", "Number of connections in the node's conntrack table.")(float64(s.Entries))
		e.gauge("conntrack_limit", "Maximum number of connections in the node's conntrack table (nf_conntrack_max).")(float64(s.Limit))
		e.counter("conntrack_insert_failed_total",
			"Number of packets that the node dropped because no free source port was found, or their connection existed already.")(float64(s.InsertFailed))
		e.counter("conntrack_drop_total", "Number of packets that the node dropped because their connection could not be tracked: "+
			"the conntrack table was full, or the insertion failed.")(float64(s.Drop))
		e.counter("conntrack_early_drop_total",
			"Number of connections that were removed from the full conntrack table to make room for others.")(float64(s.EarlyDrop))
	}
	if m.lastWithRules != nil {
		e.sources(m.lastWithRules, m.written)
		e.rules(m.lastWithRules, m.exempt)
	}
}

// guardKeys exports whether guard, staleConnections and enforceExempt work, and begins the series of resets.
func (m *Monitor) guardKeys(e exporter, rules *enforce.State) {
	gauge := e.gauge("guard_active", "Whether guard, staleConnections and enforceExempt have an effect (1) or not (0), for chains with "+
		"one of these keys; doctor names the reason.", "chain", "family")
	for _, p := range limited(rules.Policies()) {
		for _, f := range p.Families() {
			if len(p.GuardedFamilies()) == 0 && !p.ResetsConnections() || len(p.Scope(f).Sources) == 0 {
				continue // sourceCIDRs may have only the other family
			}
			at := policy.ChainFamily{Chain: p.Chain, Family: f}
			if p.ResetsConnections() {
				m.resets.addTo(at, "", 0)
			}
			fails := rules.Guard.IsInactive(at) || slices.Contains(p.GuardedFamilies(), f) && rules.Guard.Of(at) == nil
			gauge(boolToFloat(!fails), p.Chain, string(f))
		}
	}
}

type exporter chan<- prometheus.Metric

type sample func(value float64, labels ...string)

func (e exporter) gauge(name, help string, labels ...string) sample {
	return e.metric(prometheus.GaugeValue, name, help, labels)
}

func (e exporter) counter(name, help string, labels ...string) sample {
	return e.metric(prometheus.CounterValue, name, help, labels)
}

func (e exporter) metric(t prometheus.ValueType, name, help string, labels []string) sample {
	desc := prometheus.NewDesc(prefix+name, help, labels, nil)
	return func(value float64, values ...string) { e <- prometheus.MustNewConstMetric(desc, t, value, values...) }
}

func limited[T any](items []T) []T { return items[:min(len(items), maxNames)] }

// sources exports the sources that are stored or have a problem.
func (e exporter) sources(r *reconcile.Report, written map[policy.SourceID]time.Time) {
	valid := e.gauge("source_valid", "Whether the source is valid (1) or not (0); if not, its last good policy is in force.", "source")
	hash := e.gauge("source_hash", "Hash of the source's policy: the first 48 bits of its SHA-256 as a number, equal on nodes with the same policy.", "source")
	warnings := e.gauge("source_warnings", "Number of warnings about keys of the source that are unknown and ignored.", "source")
	stored := e.gauge("source_last_written_timestamp_seconds", "Time when the source's policy was last stored, in seconds since 1970.", "source")
	var ids []policy.SourceID
	for _, s := range r.State.Sources {
		ids = append(ids, s.ID)
	}
	invalid := map[policy.SourceID]bool{}
	for _, p := range r.Problems {
		if p.Source != (policy.SourceID{}) {
			ids = append(ids, p.Source)
			invalid[p.Source] = invalid[p.Source] || p.Reason == reconcile.ReasonSource
		}
	}
	slices.SortFunc(ids, policy.SourceID.Compare)
	for _, id := range limited(slices.Compact(ids)) {
		name, unknown := string(id.Kind), 0
		if id.Kind == policy.Network {
			name += "/" + label(id.Name)
		} else if r.Sources != nil && r.Sources.Agent != nil {
			unknown = len(r.Sources.Agent.UnknownKeys)
		}
		valid(boolToFloat(!invalid[id]), name)
		warnings(float64(unknown), name)
		if s := r.State.Find(id); s != nil {
			hash(float64(hashOf(s.Policies())), name)
		}
		if at, known := written[id]; known {
			stored(timestamp(at), name)
		}
	}
}

// rules exports the policies in force, their backends, and the pods that a state has.
func (e exporter) rules(r *reconcile.Report, pods *enforce.State) {
	conflict := e.gauge("policy_conflict", "Number of conflicts between the sources of the chain.", "chain")
	prefixes := e.gauge("prefixes", "Number of destination prefixes in the policy, by action.", "chain", "family", "action")
	exemptPods := e.gauge("exempt_pods", "Number of pods that are never masqueraded because of their namespace, for chains with "+
		"nonMasqueradeNamespaces.", "chain")
	conflicts := map[string]int{}
	for _, p := range r.Problems { // of conflicts in force, where one source is superseded, and of refused sources
		if e, is := errors.AsType[*policy.ConflictError](p.Err); is {
			conflicts[e.Chain]++
		}
	}
	for _, p := range limited(r.Rules.Policies()) {
		conflict(float64(conflicts[p.Chain]), p.Chain)
		if len(p.Namespaces) > 0 {
			exemptPods(float64(pods.ExemptPods(p)), p.Chain)
		}
		for _, f := range p.Families() {
			n := map[policy.Action]int{policy.ActionExempt: 0, policy.ActionMasquerade: 0}
			for _, d := range p.Destinations {
				if policy.FamilyOf(d.Prefix.Addr()) == f {
					n[d.Action]++
				}
			}
			for action, n := range n {
				prefixes(float64(n), p.Chain, string(f), string(action))
			}
		}
	}
	info := e.gauge("backend_info", "Information about the backends of the rules; the value is always 1.", "backend", "variant")
	backends := map[netfilter.Choice]bool{}
	for _, c := range r.Rules.Chains {
		if b := c.Choice; b.Backend != "" && !backends[b] {
			info(1, label(string(b.Backend)), label(b.Variant))
			backends[b] = true
		}
	}
}

// entryPresent reports whether the first network, Multus aside, has the plugin entry; nil if unknown.
func entryPresent(s *reconcile.Sources) *bool {
	if s == nil || s.ConfDirErr != nil && !errors.Is(s.ConfDirErr, fs.ErrNotExist) {
		return nil
	}
	first := slices.IndexFunc(s.ConfDir.Conflists, func(l config.Conflist) bool { return !l.IsMultus() || len(l.Entries) > 0 })
	return new(first >= 0 && len(s.ConfDir.Conflists[first].Entries) > 0)
}

// hashOf returns 48 bits of a policy's hash, which a float64 holds exactly.
func hashOf(policies []policy.SourcePolicy) uint64 {
	doc, _ := json.Marshal(policies) // never fails
	sum := sha256.Sum256(doc)
	return binary.BigEndian.Uint64(sum[:8]) >> 16
}

func timestamp(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }

func boolToFloat(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// label makes the value of a label: printable ASCII, quoted if it was anything else. A value that is
// too long ends in a part of its hash, so that values with the same beginning differ.
func label(s string) string {
	v := s
	if strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }) {
		v = strconv.QuoteToASCII(v)
	}
	if len(v) > maxLabel {
		end := fmt.Sprintf("~%x", sha256.Sum256([]byte(s)))[:9]
		v = v[:maxLabel-len(end)] + end
	}
	return v
}

// series are the labels of a number. A metric may have only the first of them.
type series struct {
	policy.ChainFamily
	action string
}

// collect exports numbers with the first so many of chain, family and action as their labels.
func collect(numbers map[series]uint64, labels int, to sample) {
	for s, n := range numbers {
		to(float64(n), []string{s.Chain, string(s.Family), s.action}[:labels]...)
	}
}

type kernelChain struct {
	netfilter.Choice
	policy.ChainFamily
}

// totals adds up the kernel's counters by action. The first value counts in full, as the rules may be older than this
// process. One that fell adds nothing: rules were recreated, or removed. What is counted between the observations before
// and after that is lost.
type totals struct {
	last   map[kernelChain]map[string]uint64
	sums   map[series]uint64
	chains map[string]bool // that have series
}

func newTotals() totals {
	return totals{map[kernelChain]map[string]uint64{}, map[series]uint64{}, map[string]bool{}}
}

// observe adds what counters counted since their last observation, and forgets those of chains that are gone.
func (t *totals) observe(now map[kernelChain]map[string]uint64, gone func(kernelChain) bool) {
	byName := func(a, b kernelChain) int { return strings.Compare(a.Chain, b.Chain) }
	for _, p := range slices.SortedFunc(maps.Keys(now), byName) { // of too many chains, the first get series
		for action, n := range now[p] {
			t.addTo(p.ChainFamily, action, n-min(n, t.last[p][action]))
		}
		t.last[p] = now[p]
	}
	maps.DeleteFunc(t.last, func(p kernelChain, _ map[string]uint64) bool { return now[p] == nil && gone(p) })
}

// addTo adds a number to a series, which exists from then on.
func (t *totals) addTo(c policy.ChainFamily, action string, n uint64) {
	if t.chains[c.Chain] || len(t.chains) < maxNames {
		t.chains[c.Chain] = true
		t.sums[series{c, action}] += n
	}
}

// count adds the connections, and the packets that guards counted or dropped, since the state before. It ignores nil.
func (m *Monitor) count(s *enforce.State) {
	if s == nil {
		return
	}
	const exempt, masquerade = string(policy.ActionExempt), string(policy.ActionMasquerade)
	now := map[kernelChain]map[string]uint64{}
	for _, chain := range s.Chains {
		for _, observed := range chain.Observed.Chains {
			n := map[policy.Verdict]uint64{}
			for _, r := range observed.Rules {
				n[r.Verdict] += r.Connections
			}
			at := policy.ChainFamily{Chain: observed.Name, Family: observed.Family}
			now[kernelChain{chain.Choice, at}] = map[string]uint64{exempt: n[policy.Return], masquerade: n[policy.Masquerade]}
		}
	}
	for bound, n := range s.Guard.Observed.Bound { // before the masquerade chain sees them
		if s.Find(bound.Chain) != nil {
			now[kernelChain{ChainFamily: bound}] = map[string]uint64{exempt: n}
		}
	}
	// A chain that could not be observed may still exist: its counters must not count twice.
	gone := func(p kernelChain) bool {
		if p.Choice == (netfilter.Choice{}) {
			return s.Guard.Err == nil
		}
		chain := s.Find(p.Chain)
		return chain == nil || chain.Err == nil
	}
	m.connections.observe(now, gone)
	for _, g := range s.Guard.Desired {
		if g.Mode != policy.GuardOff {
			m.guards.addTo(policy.ChainFamily{Chain: g.Chain, Family: g.Family}, string(g.Mode), 0)
		}
	}
	now = map[kernelChain]map[string]uint64{}
	for _, g := range s.Guard.Observed.Guards {
		at := policy.ChainFamily{Chain: g.Chain, Family: g.Family}
		if desired := s.Guard.Of(at); g.Mode != policy.GuardOff && desired != nil && desired.Mode != policy.GuardOff {
			now[kernelChain{ChainFamily: at}] = map[string]uint64{string(g.Mode): s.Guard.Observed.Packets[at]}
		}
	}
	m.guards.observe(now, gone)
}
