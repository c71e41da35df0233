// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// passes counts passes and what they repaired.
type passes struct {
	results  *prometheus.CounterVec
	duration prometheus.Histogram
	repairs  *prometheus.CounterVec
	success  prometheus.Gauge
}

// newPasses returns counters that have every label there is, at 0: a rate over
// a counter that was missing does not see its first increase.
func newPasses() passes {
	p := passes{
		results: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "ip_masq_reconciles_total",
			Help: "Passes over the node, by what came of them.",
		}, []string{"result"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "ip_masq_reconcile_duration_seconds",
			Help:    "How long passes took.",
			Buckets: []float64{.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}),
		repairs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "ip_masq_drift_repairs_total",
			Help: "Differences found in rules that had been made before, by kind: what others had changed.",
		}, []string{"kind"}),
		success: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "ip_masq_last_reconcile_success_timestamp_seconds",
			Help: "When the last pass ended that could do what had to be done; 0 before there was one.",
		}),
	}
	for _, r := range reconcile.Results() {
		p.results.WithLabelValues(string(r))
	}
	for _, k := range changeKinds() {
		p.repairs.WithLabelValues(string(k))
	}
	return p
}

func changeKinds() []policy.ChangeKind {
	return []policy.ChangeKind{
		policy.ChainChange, policy.JumpChange, policy.RuleChange, policy.OrderChange, policy.ElementChange, policy.UnrecognizedChange,
	}
}

func (p passes) count(r *reconcile.Report) {
	p.results.WithLabelValues(string(r.Result)).Inc()
	p.duration.Observe(r.Took.Seconds())
	if r.Result != reconcile.Failed {
		p.success.Set(timestamp(r.Started.Add(r.Took)))
	}
	for _, c := range r.Drift {
		p.repairs.WithLabelValues(string(c.Kind)).Inc()
	}
}

// timestamp returns a time as metrics have it: in seconds since 1970.
func timestamp(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }
