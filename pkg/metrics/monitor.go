// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/singleflight"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// scrapeTimeout is how long a scrape waits for Options' functions before it serves the answers of the last
// one.
const scrapeTimeout = 2 * time.Second

// Options provide what reports do not contain. Scrapes call the functions; the Status calls State, Record and
// PluginVersion, one of these at a time. A Monitor that serves health alone needs none of them.
type Options struct {
	Version string // of this program

	// State observes the rules; nil if they cannot be read, or a report will follow.
	State func(context.Context) *enforce.State
	// ThirdParty counts the third-party rules that defeat the policy, for the last report with rules.
	ThirdParty func(*reconcile.Report) (int, error)
	// Conntrack reads the numbers of the node's conntrack.
	Conntrack func(context.Context) (conntrack.Stats, error)
	// Record reads the record, which has the numbers of connections that ADDs reset too.
	Record func() (store.Record, error)
	// PluginVersion returns the version of the installed plugin, "" without one.
	PluginVersion func() string
	// Written returns when a source's document was written; zero without one.
	Written func(policy.SourceID) (written time.Time, err error)

	Log *slog.Logger // nil: none
}

// Monitor collects what health and metrics are about. Its methods may be called by any goroutine.
type Monitor struct {
	options  Options
	log      *slog.Logger
	registry *prometheus.Registry
	duration prometheus.Histogram
	requests singleflight.Group
	started  time.Time

	observing sync.Mutex // while Options.State and then the totals are in use
	mu        sync.Mutex // for what follows

	settings   Settings
	listenErrs map[string]string // why addresses cannot be bound, by their settings
	plugin     string            // the version of the installed one
	last       lastReport
	syncs      syncs
	scrape     scraped // for the last scrape

	// What the kernel counted.
	connections   totals
	guards        totals
	resets        totals // connections that were reset
	resetFailures int    // how often a reset failed
}

// lastReport is what is known of the node by the last report.
type lastReport struct {
	reports    int // how many there were, with this one
	at         time.Time
	interval   time.Duration // until the next one
	problems   []reconcile.Problem
	conflist   *conflist.Status
	unrecorded []reconcile.UnrecordedPod
	sources    *reconcile.Sources // of the last one that has some
	withRules  *reconcile.Report  // the last one with rules
	exempt     *enforce.State     // for the number of exempt pods: that of the report, or one observed since
}

// syncs are the numbers of syncs and of what they did.
type syncs struct {
	results  map[reconcile.Result]int
	repairs  map[policy.ChangeKind]int
	success  float64  // time of the last one that did not fail
	inserted int      // how often the plugin entry was inserted
	repaired []Repair // the latest ones, the newest first
	total    int      // how many repairs there were
}

// scraped is what a scrape asks for and reports do not contain.
type scraped struct {
	written    map[policy.SourceID]time.Time
	conntrack  *conntrack.Stats // nil if unknown
	thirdParty *int             // nil if unknown
}

// New returns a Monitor without a report.
func New(o Options) *Monitor {
	m := &Monitor{
		options: o, log: flowcontrol.LogOnce(cmp.Or(o.Log, slog.New(slog.DiscardHandler))),
		registry: prometheus.NewRegistry(), started: time.Now(),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    prefix + "reconcile_duration_seconds",
			Help:    "Time of a sync from its start to its end, in seconds.",
			Buckets: []float64{.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}),
		listenErrs:  map[string]string{},
		last:        lastReport{at: time.Now(), interval: time.Minute}, // as if one came at the start
		syncs:       syncs{results: map[reconcile.Result]int{}, repairs: map[policy.ChangeKind]int{}},
		connections: newTotals(), guards: newTotals(), resets: newTotals(),
	}
	m.registry.MustRegister(m, m.duration)
	return m
}

// Report records a report, which must not change any more, and that the next one is due after the interval.
func (m *Monitor) Report(r *reconcile.Report, interval time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	last := &m.last
	last.reports++
	last.at, last.interval = time.Now(), interval
	last.problems, last.conflist, last.unrecorded = r.Problems, r.Conflist, r.Unrecorded
	if isStandby(r) {
		last.sources, last.withRules = nil, nil // the active reconciler exports them
		return
	}
	if !r.Waiting {
		m.duration.Observe(r.Took.Seconds())
		m.syncs.count(r)
	}
	last.sources = cmp.Or(r.Sources, last.sources)
	if r.Rules != nil {
		last.withRules, last.exempt = r, r.Rules
	}
	m.count(r.Before)
	m.count(r.Rules)
}

func isStandby(r *reconcile.Report) bool {
	for _, p := range r.Problems {
		if p.Reason == reconcile.ReasonStandby {
			return true
		}
	}
	return false
}

// count counts a sync.
func (s *syncs) count(r *reconcile.Report) {
	if r.Conflist != nil {
		s.inserted += r.Conflist.Inserted
	}
	s.results[r.Result]++
	ended := r.Started.Add(r.Took)
	if r.Result != reconcile.Failed {
		s.success = timestamp(ended)
	}
	if len(r.Drift) == 0 {
		return
	}
	for _, change := range r.Drift {
		s.repairs[change.Kind]++
	}
	const most = 10
	chains, missing, unexpected := r.Drift.Totals()
	repair := Repair{ended.UTC(), r.By.String(), chains, missing, unexpected}
	s.repaired = slices.Insert(s.repaired, 0, repair)
	s.repaired = s.repaired[:min(len(s.repaired), most)]
	s.total++
}

// ConnectionsReset records connections that were reset and are not on record, and a reset that failed.
func (m *Monitor) ConnectionsReset(deleted map[policy.ChainFamily]uint64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		m.resetFailures++
	}
	_, isUnwritable := errors.AsType[*enforce.UnwritableError](err)
	if isUnwritable { // the record could not be written, so it does not have these numbers
		for c, n := range deleted {
			m.resets.addTo(c, "", n)
		}
	}
}

// stopped returns an error if the loop has stopped: it missed three syncs and half a minute more.
func (m *Monitor) stopped() error {
	silence := time.Since(m.last.at)
	if silence <= 3*m.last.interval+30*time.Second {
		return nil
	}
	silence = silence.Round(time.Second)
	return fmt.Errorf("no sync was made for %s, and one is due every %s", silence, m.last.interval)
}

// problemsNow returns the problems of the last report, and that the loop has stopped.
func (m *Monitor) problemsNow() []reconcile.Problem {
	if m.last.reports == 0 {
		none := errors.New("no sync was made yet")
		return []reconcile.Problem{{Reason: reconcile.ReasonRules, Err: none}}
	}
	if err := m.stopped(); err != nil {
		stopped := reconcile.Problem{Reason: reconcile.ReasonRules, Err: err}
		return append([]reconcile.Problem{stopped}, m.last.problems...)
	}
	return m.last.problems
}

// Health returns the handler of /livez and /healthz, which are about the process, of /readyz, which is about
// the node, and of /statusz and /flagz, which are for people.
func (m *Monitor) Health() http.Handler {
	live := m.check(m.stopped)
	return handler(map[string]http.HandlerFunc{
		"GET /livez": live, "GET /healthz": live, "GET /readyz": m.check(m.readinessErr),
		"GET /statusz": zPage("statusz", m.statusz), "GET /flagz": zPage("flagz", m.flagz),
	})
}

// readinessErr returns why the node is not ready, or nil.
func (m *Monitor) readinessErr() error {
	var errs []error
	for _, p := range m.problemsNow() {
		text := strings.TrimRight(p.Err.Error(), "\n")
		errs = append(errs, fmt.Errorf("%s: %s", p.Reason, strings.ReplaceAll(text, "\n", "\n  ")))
	}
	return errors.Join(errs...)
}

func (m *Monitor) check(problems func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		m.mu.Lock()
		err := problems()
		m.mu.Unlock()
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintln(w, "ok")
	}
}

// Metrics returns the handler of /metrics.
func (m *Monitor) Metrics() http.Handler {
	// A compressor takes more memory than everything else here.
	page := promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{DisableCompression: true})
	return handler(map[string]http.HandlerFunc{"GET /metrics": func(w http.ResponseWriter, r *http.Request) {
		m.refreshed(r.Context(), scrapeTimeout, "scrape", m.refresh)
		page.ServeHTTP(w, r)
	}})
}

// refreshed calls a refresh, and returns at the latest after the timeout. Requests share the one that runs: a
// kernel that does not answer is not asked by ever more goroutines.
func (m *Monitor) refreshed(
	ctx context.Context, timeout time.Duration, name string, refresh func(context.Context),
) {
	done := m.requests.DoChan(name, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		refresh(ctx)
		return nil, nil
	})
	select {
	case <-done:
	case <-time.After(timeout):
	case <-ctx.Done():
	}
}

func handler(pages map[string]http.HandlerFunc) http.Handler {
	mux := http.NewServeMux()
	for path, page := range pages {
		mux.HandleFunc(path, page)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		mux.ServeHTTP(w, r)
	})
}

// refresh asks for what a scrape exports and reports do not contain.
func (m *Monitor) refresh(ctx context.Context) {
	m.mu.Lock()
	last := m.last.withRules
	m.mu.Unlock()
	found := scraped{written: map[policy.SourceID]time.Time{}}
	if last != nil {
		m.readWritten(last, found.written)
		// A third-party rule alone causes no sync, and so no report: it is counted at each scrape.
		n, err := m.options.ThirdParty(last)
		if err == nil {
			found.thirdParty = &n
		} else {
			m.log.Warn("failed to count third-party rules", "err", err)
		}
	}
	stats, err := m.options.Conntrack(ctx)
	if err == nil {
		found.conntrack = &stats
	} else {
		m.log.Warn("failed to read conntrack statistics", "err", err)
	}
	m.mu.Lock()
	m.scrape = found
	m.mu.Unlock()
	m.observe(ctx)
}

// readWritten reads when the documents of a report's sources were written.
func (m *Monitor) readWritten(r *reconcile.Report, written map[policy.SourceID]time.Time) {
	for _, s := range r.State.Sources {
		at, err := m.options.Written(s.ID)
		if err != nil {
			m.log.Warn("failed to read the age of a source's document", "source", s.ID.String(), "err", err)
		} else if !at.IsZero() {
			written[s.ID] = at
		}
	}
}

// observe observes the rules, reads the record and the version of the plugin, and adds up the counters. The
// Status and each scrape need that.
func (m *Monitor) observe(ctx context.Context) {
	m.observing.Lock()
	defer m.observing.Unlock()
	m.mu.Lock()
	reports, active := m.last.reports, m.last.withRules != nil
	m.mu.Unlock()
	state, plugin := m.options.State(ctx), m.options.PluginVersion()
	var rec store.Record
	if active {
		rec, _ = m.options.Record() // the reports tell why it cannot be read
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.plugin = plugin
	deleted := map[kernelChain]map[string]uint64{}
	for _, d := range rec.Deleted {
		deleted[kernelChain{ChainFamily: d.ChainFamily}] = map[string]uint64{"": d.Connections}
	}
	m.resets.observe(deleted, func(kernelChain) bool { return false })
	// A state that a sync overtook may be the older one; its counters would be counted twice.
	if m.last.reports == reports {
		m.last.exempt = cmp.Or(state, m.last.exempt)
		m.count(state)
	}
}

// zPage answers as the z-pages of Kubernetes components do: a header and plain text.
func zPage(name string, page func(io.Writer)) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "\nip-masq-reconciler %s\nWarning: This endpoint is not meant to be machine "+
			"parseable, "+
			"has no formatting compatibility guarantees and is for debugging purposes only.\n\n", name)
		page(w)
	}
}

func (m *Monitor) statusz(w io.Writer) {
	up := int(time.Since(m.started).Seconds())
	const format = "Started: %s\nUp: %d hr %02d min %02d sec\nGo version: %s\nBinary version: %s\nPaths: %s\n"
	fmt.Fprintf(w, format,
		m.started.UTC().Format(time.UnixDate), up/3600, up/60%60, up%60, runtime.Version(), m.options.Version,
		"/flagz /healthz /livez /readyz /statusz")
}

func (m *Monitor) flagz(w io.Writer) {
	m.mu.Lock()
	flags := m.settings.Flags // not changed any more
	m.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		fmt.Fprintf(w, "%s=%s\n", name, policy.Printable(flags[name]))
	}
}
