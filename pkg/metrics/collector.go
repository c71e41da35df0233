// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

const prefix = "ip_masq_"

// counters are the metrics that count syncs.
type counters struct {
	build, success   prometheus.Gauge
	results, repairs *prometheus.CounterVec
	duration         prometheus.Histogram
	entries          prometheus.Counter
}

// newCounters returns counters that have each value of their labels at 0: rate() does not see the
// first increase of a series that did not exist.
func newCounters(version string) counters {
	c := counters{
		build: prometheus.NewGauge(prometheus.GaugeOpts{
			Name:        prefix + "build_info",
			Help:        "Version of ip-masq-reconciler and of Go; the value is always 1.",
			ConstLabels: prometheus.Labels{"version": label(version), "go_version": label(runtime.Version())},
		}),
		results: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: prefix + "reconciles_total",
			Help: "Number of syncs, by result.",
		}, []string{"result"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    prefix + "reconcile_duration_seconds",
			Help:    "Duration of syncs in seconds.",
			Buckets: []float64{.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}),
		repairs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: prefix + "drift_repairs_total",
			Help: "Number of differences that other programs caused in written rules and a sync repaired, by kind.",
		}, []string{"kind"}),
		success: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: prefix + "last_reconcile_success_timestamp_seconds",
			Help: "Time of the end of the last sync that did not fail, in seconds since 1970; 0 before the first.",
		}),
		entries: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "conflist_repairs_total",
			Help: "Number of times that the plugin entry was inserted into the conflist (with conflist.manage).",
		}),
	}
	c.build.Set(1)
	for _, r := range reconcile.Results() {
		c.results.WithLabelValues(string(r))
	}
	for _, k := range []policy.ChangeKind{
		policy.ChainChange, policy.JumpChange, policy.RuleChange, policy.OrderChange, policy.ElementChange, policy.UnrecognizedChange,
	} {
		c.repairs.WithLabelValues(string(k))
	}
	return c
}

func (c counters) count(r *reconcile.Report) {
	c.results.WithLabelValues(string(r.Result)).Inc()
	c.duration.Observe(r.Took.Seconds())
	if r.Result != reconcile.Failed {
		c.success.Set(timestamp(r.Started.Add(r.Took)))
	}
	for _, change := range r.Drift {
		c.repairs.WithLabelValues(string(change.Kind)).Inc()
	}
}

func timestamp(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }

// Describe implements prometheus.Collector. Without descriptions, metrics are checked when they are
// collected.
func (m *Monitor) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector: it exports what the last reports and the last scrape
// found, under one lock.
func (m *Monitor) Collect(out chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	metric := func(t prometheus.ValueType, name, help string, labels ...string) func(value float64, values ...string) {
		desc := prometheus.NewDesc(prefix+name, help, labels, nil)
		return func(value float64, values ...string) {
			out <- prometheus.MustNewConstMetric(desc, t, value, values...)
		}
	}
	gauge := func(name, help string, labels ...string) func(value float64, values ...string) {
		return metric(prometheus.GaugeValue, name, help, labels...)
	}
	unready := map[reconcile.Reason]bool{}
	for _, p := range m.unready() {
		unready[p.Reason] = true
	}
	gauge("ready", "Whether the rules are what the sources ask for (1) or not (0), as /readyz says.")(truth(len(unready) == 0))
	notReady := gauge("not_ready", "Whether the node is not ready for this reason (1) or not (0).", "reason")
	for _, r := range reconcile.Reasons() {
		notReady(truth(unready[r]), string(r))
	}
	present := m.facts.conflist
	if m.managed != nil {
		present = &m.managed.Present
		gauge("conflist_flapping", "Whether another program removes the plugin entry from the conflist repeatedly (1) or not (0); "+
			"with conflist.manage only.")(truth(m.managed.Flapping))
	}
	if present != nil {
		gauge("conflist_present", "Whether the network that the runtime uses has the plugin entry (1) or not (0). With conflist.manage it "+
			"is the network that conflist.network names, if it names one.")(truth(*present))
	}
	if m.thirdParty != nil {
		gauge("foreign_rules", "Number of third-party rules that defeat the policy; doctor names them.")(float64(*m.thirdParty))
	}
	valid := gauge("source_valid", "Whether the source is valid (1) or not (0); if not, its last good policy is in force.", "source")
	hash := gauge("source_hash", "First 48 bits of the SHA-256 of the source's policy, as a number; equal on nodes with the same policy.", "source")
	written := gauge("source_last_written_timestamp_seconds", "Time when the source's policy was last stored, in seconds since 1970.", "source")
	for _, s := range m.facts.sources {
		valid(truth(s.valid), s.name)
		if s.policies == nil {
			continue
		}
		if h, err := hashOf(s.policies); err != nil {
			out <- prometheus.NewInvalidMetric(prometheus.NewInvalidDesc(err), err)
		} else {
			hash(float64(h), s.name)
		}
		if at, known := m.written[s.id]; known {
			written(timestamp(at), s.name)
		}
	}
	conflicts := gauge("policy_conflict", "Number of conflicts between the sources of the chain.", "chain")
	for chain, n := range m.facts.conflicts {
		conflicts(float64(n), chain)
	}
	prefixes := gauge("prefixes", "Number of destination prefixes in the policy, by action.", "chain", "family", "action")
	for s, n := range m.facts.prefixes {
		prefixes(float64(n), s.labels()...)
	}
	connections := metric(prometheus.CounterValue, "connections_total",
		"Number of connections that the rules of the chain decided about, as the kernel counted their first packets.",
		"chain", "family", "action")
	for s, n := range m.connections.totals {
		connections(float64(n), s.labels()...)
	}
	info := gauge("backend_info", "Backend of the rules; the value is always 1.", "backend", "variant")
	for _, b := range m.facts.backends {
		info(1, b.name, b.variant)
	}
	if m.plugin != "" {
		gauge("plugin_info", "Version of the installed CNI plugin; the value is always 1.", "version")(1, label(m.plugin))
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// hashOf returns 48 bits of a policy's hash, which a float64 holds exactly.
func hashOf(policies []policy.SourcePolicy) (uint64, error) {
	h := sha256.New()
	for _, p := range policies {
		doc, err := json.Marshal(p)
		if err != nil {
			return 0, err
		}
		_, _ = h.Write(doc) // never fails
	}
	return binary.BigEndian.Uint64(h.Sum(nil)[:8]) >> 16, nil
}
