// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// Options are what a Monitor cannot know from reports. What is a function is
// asked at a scrape, by one goroutine at a time, and may be nil.
type Options struct {
	Version string // of this program

	// State reads the rules as they stand now, and returns nil where they
	// cannot be read.
	State func(context.Context) *enforce.State
	// Foreign counts the rules of others that doctor would name.
	ThirdParty func(context.Context) (int, error)
	// PluginVersion returns the version of the plugin that is installed, or
	// "" where there is none.
	PluginVersion func() string
	// Written tells when the document of a source was last written: the zero
	// Time where there is none.
	Written func(policy.SourceID) (time.Time, error)

	// Warn takes what could not be found out for a scrape, once each.
	Warn func(error)
}

// Monitor is what the outside is told of the node. Its methods may be called by
// any goroutine.
type Monitor struct {
	options  Options
	warn     *teller
	registry *prometheus.Registry
	passes   passes
	entries  prometheus.Counter // put into conflists
	inquiry  inquiry

	mu          sync.Mutex
	pulse       pulse
	managed     *Conflist // nil: nobody here keeps our entry in the conflist
	reports     int       // how many there were
	facts       facts
	answers     answers
	connections connections
}

// New returns a Monitor that has not heard of any pass.
func New(o Options) *Monitor {
	m := &Monitor{options: o, warn: newTeller(o.Warn), registry: prometheus.NewRegistry(), passes: newPasses(), pulse: newPulse()}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "ip_masq_build_info",
		Help:        "Always 1; the labels tell what ip-masq-reconciler was built from.",
		ConstLabels: prometheus.Labels{"version": label(o.Version), "go_version": label(runtime.Version())},
	})
	build.Set(1)
	m.entries = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "ip_masq_conflist_repairs_total",
		Help: "How often our entry was put into the conflist, with conflist.manage.",
	})
	m.registry.MustRegister(build, m.entries, m.passes.results, m.passes.duration, m.passes.repairs, m.passes.success, newCollector(m.read))
	return m
}

// Report takes note of a pass, and that the next is due after the interval. Of
// the report it keeps the documents, and not the View.
func (m *Monitor) Report(r *reconcile.Report, interval time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reports++
	m.pulse.beat(r, interval)
	if r.Standby() {
		m.facts = facts{} // all of it is for the one at work to tell
		return
	}
	m.passes.count(r)
	m.facts.note(r)
	m.connections.observe(r.Before)
	m.connections.observe(r.Rules)
}

// unready returns the reasons not to take the node for ready, one an item.
func (m *Monitor) unready() []reason {
	reasons := m.pulse.unready()
	if m.managed == nil || !m.pulse.reported {
		return reasons
	}
	return append(slices.Clip(reasons), reasonsOf(m.managed.Problems)...)
}

// reading is what a scrape is told beside the counters of passes.
type reading struct {
	unready map[string]bool // by the names of the reasons
	facts
	answers
	war    *bool // whether somebody removes our entry again and again; nil: nobody here puts it back
	totals []total
}

func (m *Monitor) read() reading {
	m.mu.Lock()
	defer m.mu.Unlock()
	unready := map[string]bool{}
	for _, why := range m.unready() {
		unready[why.name] = true
	}
	r := reading{unready: unready, facts: m.facts, answers: m.answers, totals: m.connections.list()}
	if m.managed != nil {
		present, war := m.managed.Present, m.managed.Flapping
		r.conflist, r.war = &present, &war
	}
	return r
}
