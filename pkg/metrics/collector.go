// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
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

// Collect implements prometheus.Collector. A counter exists from the beginning with each value of its label,
// as rate() does not see the first increase of a series that did not exist.
func (m *Monitor) Collect(out chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := exporter(out)
	e.gauge("build_info", "Information about the version of ip-masq-reconciler and of Go; "+
		"the value is always 1.",
		"version", "go_version").set(1, label(m.options.Version), label(runtime.Version()))
	m.collectReadiness(e)
	m.collectSyncs(e)
	m.collectConflist(e)
	if m.scrape.thirdParty != nil {
		e.gauge("foreign_rules", "Number of third-party rules that defeat the policy; doctor names them.").
			set(float64(*m.scrape.thirdParty))
	}
	if m.plugin != "" {
		e.gauge("plugin_info", "Information about the version of the installed CNI plugin; "+
			"the value is always 1.", "version").set(1, label(m.plugin))
	}
	m.collectCounters(e)
	if m.scrape.conntrack != nil {
		e.conntrack(m.scrape.conntrack)
	}
	if m.last.withRules != nil {
		e.sources(m.last.withRules, m.scrape.written)
		e.rules(m.last.withRules, m.last.exempt)
	}
}

func (m *Monitor) collectReadiness(e exporter) {
	unready := map[reconcile.Reason]bool{}
	for _, p := range m.problemsNow() {
		unready[p.Reason] = true
	}
	e.gauge("ready", "Whether the node is ready (1) or not (0), as /readyz says.").
		setBool(len(unready) == 0)
	notReady := e.gauge("not_ready", "Whether the node is not ready for this reason (1) or not (0).",
		"reason")
	for _, f := range reconcile.Faults() {
		notReady.setBool(unready[f.Reason], string(f.Reason))
	}
}

func (m *Monitor) collectSyncs(e exporter) {
	results := e.counter("reconciles_total", "Number of syncs, by result.", "result")
	for _, r := range reconcile.Results() {
		results.set(float64(m.syncs.results[r]), string(r))
	}
	e.gauge("last_reconcile_success_timestamp_seconds",
		"Time of the end of the last sync that did not fail, in seconds since 1970; 0 before the first.").
		set(m.syncs.success)
	repairs := e.counter("drift_repairs_total",
		"Number of differences that other programs caused in written rules and a sync repaired, by kind.",
		"kind")
	kinds := []policy.ChangeKind{
		policy.ChainChange, policy.JumpChange, policy.RuleChange, policy.OrderChange, policy.ElementChange,
		policy.UnrecognizedChange, policy.GuardChange,
	}
	for _, k := range kinds {
		repairs.set(float64(m.syncs.repairs[k]), string(k))
	}
}

func (m *Monitor) collectConflist(e exporter) {
	e.counter("conflist_repairs_total",
		"Number of times that the plugin entry was inserted into the conflist (with conflist.manage).").
		set(float64(m.syncs.inserted))
	present, isKnown := entryPresent(m.last.sources)
	if m.last.conflist != nil {
		present, isKnown = m.last.conflist.Present, true
		e.gauge("conflist_flapping", "Whether another program removes the plugin entry from the conflist "+
			"repeatedly, or others fight about the file (1), or not (0); with conflist.manage only.").
			setBool(m.last.conflist.Flapping)
		e.gauge("conflist_entry_differs", "Whether the plugin entry differs from conflist.entry_file "+
			"and was not written by ip-masq (1) or not (0); with conflist.manage only.").
			setBool(hasFinding(m.last.conflist, conflist.EntryDiffers))
	}
	if isKnown {
		e.gauge("conflist_present", "Whether the network that the runtime uses has the plugin entry (1) or "+
			"not (0). "+
			"With conflist.manage it is the network that conflist.network names, if it names one.").
			setBool(present)
	}
}

func hasFinding(s *conflist.Status, id string) bool {
	for _, f := range s.Findings {
		if f.ID == id {
			return true
		}
	}
	return false
}

// collectCounters exports what the kernel counted.
func (m *Monitor) collectCounters(e exporter) {
	connections := e.counter("connections_total",
		"Number of connections that the rules of the chain decided about, as the kernel counted their "+
			"first packets.",
		"chain", "family", "action")
	for s, n := range m.connections.sums {
		connections.set(float64(n), s.Chain, string(s.Family), s.action)
	}
	packets := e.counter("guard_packets_total",
		"Number of packets of pods that should have been masqueraded "+
			"and were not, by what the guard did with them (count, drop).", "chain", "family", "action")
	for s, n := range m.guards.sums {
		packets.set(float64(n), s.Chain, string(s.Family), s.action)
	}
	if m.last.withRules != nil {
		e.guardKeys(m.last.withRules.Rules)
	}
	resets := e.counter("connections_reset_total", "Number of connections that were reset because the "+
		"policy changed "+
		"their verdict, or because they should have been masqueraded and were not.", "chain", "family")
	for s, n := range m.resets.sums {
		resets.set(float64(n), s.Chain, string(s.Family))
	}
	e.counter("connection_reset_failures_total", "Number of times that connections could not be reset; "+
		"it is tried again.").set(float64(m.resetFailures))
}

// guardKeys exports whether guard, staleConnections and enforceExempt work.
func (e exporter) guardKeys(rules *enforce.State) {
	gauge := e.gauge("guard_active", "Whether guard, staleConnections and enforceExempt have an effect (1) "+
		"or not (0), "+
		"for chains with one of these keys; doctor names the reason.", "chain", "family")
	for _, p := range limited(rules.Policies()) {
		if len(p.GuardedFamilies()) == 0 && !p.ResetsConnections() {
			continue
		}
		for _, f := range p.Families() {
			if len(p.Scope(f).Sources) == 0 { // sourceCIDRs may have only the other family
				continue
			}
			at := policy.ChainFamily{Chain: p.Chain, Family: f}
			lacksGuard := slices.Contains(p.GuardedFamilies(), f) && rules.Guard.Of(at) == nil
			gauge.setBool(!lacksGuard && !rules.Guard.IsInactive(at), p.Chain, string(f))
		}
	}
}

type exporter chan<- prometheus.Metric

// metric is a family of series.
type metric struct {
	out  exporter
	kind prometheus.ValueType
	desc *prometheus.Desc
}

func (e exporter) gauge(name, help string, labels ...string) metric {
	return metric{e, prometheus.GaugeValue, prometheus.NewDesc(prefix+name, help, labels, nil)}
}

func (e exporter) counter(name, help string, labels ...string) metric {
	return metric{e, prometheus.CounterValue, prometheus.NewDesc(prefix+name, help, labels, nil)}
}

// set exports the value of the series with these labels.
func (m metric) set(value float64, labels ...string) {
	m.out <- prometheus.MustNewConstMetric(m.desc, m.kind, value, labels...)
}

func (m metric) setBool(value bool, labels ...string) {
	n := 0.0
	if value {
		n = 1
	}
	m.set(n, labels...)
}

func limited[T any](items []T) []T { return items[:min(len(items), maxNames)] }

// conntrack exports the numbers of the node's conntrack. A full table and exhausted source ports share one
// alert: the kernel counts both as drops.
func (e exporter) conntrack(s *conntrack.Stats) {
	e.gauge("conntrack_entries", "Number of connections in the node's conntrack table.").
		set(float64(s.Entries))
	e.gauge("conntrack_limit", "Maximum number of connections in the node's conntrack table "+
		"(nf_conntrack_max).").
		set(float64(s.Limit))
	e.counter("conntrack_insert_failed_total", "Number of packets that the node dropped because no free "+
		"source port "+
		"was found, or their connection existed already.").set(float64(s.InsertFailed))
	e.counter("conntrack_drop_total", "Number of packets that the node dropped because their connection "+
		"could not be "+
		"tracked: the conntrack table was full, or the insertion failed.").set(float64(s.Drop))
	e.counter("conntrack_early_drop_total", "Number of connections that were removed from the full "+
		"conntrack table "+
		"to make room for others.").set(float64(s.EarlyDrop))
}

// sources exports the sources that are stored or have a problem.
func (e exporter) sources(r *reconcile.Report, written map[policy.SourceID]time.Time) {
	valid := e.gauge("source_valid",
		"Whether the source is valid (1) or not (0); if not, its last good policy is in force.", "source")
	hash := e.gauge("source_hash", "Hash of the source's policy: the first 48 bits of its SHA-256 as a "+
		"number, "+
		"equal on nodes with the same policy.", "source")
	warnings := e.gauge("source_warnings",
		"Number of warnings about keys of the source that are unknown and ignored.", "source")
	stored := e.gauge("source_last_written_timestamp_seconds",
		"Time when the source's policy was last stored, in seconds since 1970.", "source")
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
		valid.setBool(!invalid[id], name)
		warnings.set(float64(unknown), name)
		if s := r.State.Find(id); s != nil {
			hash.set(float64(hashOf(s.Policies())), name)
		}
		if at, known := written[id]; known {
			stored.set(timestamp(at), name)
		}
	}
}

// rules exports the policies in force, their backends, and the pods that a state has.
func (e exporter) rules(r *reconcile.Report, pods *enforce.State) {
	conflict := e.gauge("policy_conflict", "Number of conflicts between the sources of the chain.", "chain")
	prefixes := e.gauge("prefixes", "Number of destination prefixes in the policy, by action.",
		"chain", "family", "action")
	exemptPods := e.gauge("exempt_pods", "Number of pods that are never masqueraded because of their "+
		"namespace, "+
		"for chains with nonMasqueradeNamespaces.", "chain")
	conflicts := map[string]int{} // also those of sources that were refused
	for _, p := range r.Problems {
		conflict, is := errors.AsType[*policy.ConflictError](p.Err)
		if is {
			conflicts[conflict.Chain]++
		}
	}
	for _, p := range limited(r.Rules.Policies()) {
		conflict.set(float64(conflicts[p.Chain]), p.Chain)
		if len(p.Namespaces) > 0 {
			exemptPods.set(float64(pods.CountExemptPods(p)), p.Chain)
		}
		for _, f := range p.Families() {
			for action, n := range countPrefixes(p, f) {
				prefixes.set(float64(n), p.Chain, string(f), string(action))
			}
		}
	}
	info := e.gauge("backend_info", "Information about the backends of the rules; the value is always 1.",
		"backend", "variant")
	backends := map[netfilter.Choice]bool{}
	for _, c := range r.Rules.Chains {
		b := c.Choice
		if b.Backend != "" && !backends[b] {
			info.set(1, label(string(b.Backend)), label(b.Variant))
			backends[b] = true
		}
	}
}

func countPrefixes(p policy.Policy, f policy.Family) map[policy.Action]int {
	n := map[policy.Action]int{policy.ActionExempt: 0, policy.ActionMasquerade: 0}
	for _, d := range p.Destinations {
		if policy.FamilyOf(d.Prefix.Addr()) == f {
			n[d.Action]++
		}
	}
	return n
}

// entryPresent reports whether the network that the runtime uses has the plugin entry, and whether that is
// known. A file that the runtime cannot load has none.
func entryPresent(s *reconcile.Sources) (present, isKnown bool) {
	if s == nil {
		return false, false
	}
	isUnreadable := s.ConfDirErr != nil && !errors.Is(s.ConfDirErr, fs.ErrNotExist)
	if isUnreadable {
		return false, false
	}
	used, err := conflist.Used(s.ConfDir)
	if errors.Is(err, conflist.ErrDelegate) {
		return false, false
	}
	return err == nil && used.Entries > 0, true
}

// hashOf returns 48 bits of a policy's hash, which a float64 holds exactly.
func hashOf(policies []policy.SourcePolicy) uint64 {
	doc, _ := json.Marshal(policies) // never fails
	sum := sha256.Sum256(doc)
	return binary.BigEndian.Uint64(sum[:8]) >> 16
}

func timestamp(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }

// label makes the value of a label: printable ASCII, quoted if it was anything else. A value that is
// too long ends in a part of its hash, so that values with the same beginning differ.
func label(s string) string {
	v := s
	if strings.ContainsFunc(v, mustBeQuoted) {
		v = strconv.QuoteToASCII(v)
	}
	if len(v) > maxLabel {
		end := fmt.Sprintf("~%x", sha256.Sum256([]byte(s)))[:9]
		v = v[:maxLabel-len(end)] + end
	}
	return v
}

func mustBeQuoted(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }
