// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// patience is how long a scrape waits for answers. Without them it tells what
// was known before.
const patience = 2 * time.Second

// answers are what is found out for a scrape, beside the rules.
type answers struct {
	foreign *int // nil: nobody knows
	plugin  string
	written map[policy.SourceID]time.Time
}

// inquiry is the one that is under way, which all scrapes at that time share: a
// kernel that does not answer is not asked by ever more goroutines.
type inquiry struct {
	mu   sync.Mutex
	over chan struct{} // nil while none is under way
}

// Metrics returns the handler of /metrics.
func (m *Monitor) Metrics() http.Handler {
	page := promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		ErrorLog:           m.warn,
		ErrorHandling:      promhttp.ContinueOnError,
		DisableCompression: true, // a compressor takes more memory than all else here
	})
	return pages{"/metrics": func(w http.ResponseWriter, r *http.Request) {
		m.ask(r.Context())
		page.ServeHTTP(w, r)
	}}
}

// ask asks for what reports do not tell, and waits a moment for the answers.
func (m *Monitor) ask(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	q := &m.inquiry
	q.mu.Lock()
	over := q.over
	if over == nil {
		over = make(chan struct{})
		q.over = over
		go func() {
			m.inquire()
			q.mu.Lock()
			q.over = nil
			q.mu.Unlock()
			close(over)
		}()
	}
	q.mu.Unlock()
	select {
	case <-over:
	case <-ctx.Done():
	}
}

func (m *Monitor) inquire() {
	// Not that of a request: others may wait for the same answers.
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	m.inquireSources()
	if m.options.PluginVersion != nil {
		version := m.options.PluginVersion()
		m.mu.Lock()
		m.answers.plugin = version
		m.mu.Unlock()
	}
	m.inquireRules(ctx)
	if m.options.ThirdParty != nil {
		var known *int
		n, err := m.options.ThirdParty(ctx)
		if err != nil {
			m.warn.tell(fmt.Errorf("metrics cannot tell foreign_rules: %w", err))
		} else {
			known = &n
		}
		m.mu.Lock()
		m.answers.foreign = known
		m.mu.Unlock()
	}
}

func (m *Monitor) inquireSources() {
	if m.options.Written == nil {
		return
	}
	m.mu.Lock()
	sources := m.facts.sources
	m.mu.Unlock()
	written := map[policy.SourceID]time.Time{}
	for _, s := range sources {
		if s.statement == nil {
			continue
		}
		at, err := m.options.Written(s.SourceID)
		if err != nil {
			m.warn.tell(fmt.Errorf("metrics cannot tell the age of what %s states: %w", s.SourceID, err))
		} else if !at.IsZero() {
			written[s.SourceID] = at
		}
	}
	m.mu.Lock()
	m.answers.written = written
	m.mu.Unlock()
}

// inquireRules brings the counters up to date. A reading during which a pass was
// reported may be the older of the two; to take its counters for the newer ones
// would count twice.
func (m *Monitor) inquireRules(ctx context.Context) {
	if m.options.State == nil {
		return
	}
	m.mu.Lock()
	before := m.reports
	m.mu.Unlock()
	v := m.options.State(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.reports == before {
		m.connections.observe(v)
	}
}
