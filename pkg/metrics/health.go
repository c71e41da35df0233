// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// pulse is what is known of the loop.
type pulse struct {
	last     time.Time // when it reported, or the process began
	interval time.Duration
	reported bool
	problems []reason
}

// reason is why the node is not ready: a line of /readyz, and the name that the metric
// not_ready has for its kind.
type reason struct{ name, line string }

// rulesReason is the reason of a node whose rules nobody makes sure of.
const rulesReason = "rules"

// reasonNames returns the values that the label reason can have.
func reasonNames() []string {
	return []string{rulesReason, "state", "source", "conflict", "conflist", "plugin", "backend", "standby", "flapping"}
}

func reasonOf(p reconcile.Problem) reason {
	name := string(p.Reason)
	switch {
	case p.Reason == reconcile.ReasonFlapping:
		name = "flapping"
	case p.Reason == reconcile.ReasonSettings:
		name = "source"
	case p.Reason == reconcile.ReasonRules && errors.Is(p.Err, netfilter.ErrUnusable):
		name = "backend"
	case !slices.Contains(reasonNames(), name):
		name = rulesReason
	}
	return reason{name, fmt.Sprintf("%s: %s", p.Reason, indented(p.Err.Error()))}
}

func reasonsOf(problems []reconcile.Problem) []reason {
	var all []reason
	for _, p := range problems {
		all = append(all, reasonOf(p))
	}
	return all
}

func newPulse() pulse {
	const unknown = time.Minute // the interval, before anybody has told it
	return pulse{last: time.Now(), interval: unknown}
}

func (p *pulse) beat(r *reconcile.Report, interval time.Duration) {
	*p = pulse{last: time.Now(), interval: interval, reported: true, problems: reasonsOf(r.Problems)}
}

// indented writes text so that only its first line begins where lines begin.
func indented(text string) string {
	return strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n  ")
}

// stopped returns the reason to take the loop for dead: it missed three passes
// and half a minute more. It returns "" of one that lives.
func (p *pulse) stopped() string {
	const grace = 30 * time.Second
	silence := time.Since(p.last)
	if silence <= 3*p.interval+grace {
		return ""
	}
	return fmt.Sprintf("no pass was made for %s, and one is due every %s", silence.Round(time.Second), p.interval)
}

// unready returns what of the loop and its passes is a reason not to take the
// node for ready, one an item.
func (p *pulse) unready() []reason {
	if !p.reported {
		return []reason{{rulesReason, "not ready: no pass made yet"}}
	}
	if why := p.stopped(); why != "" {
		return append([]reason{{rulesReason, "loop: " + why}}, p.problems...)
	}
	return p.problems
}

// Health returns the handler of /livez and /healthz, which are about the
// process, and of /readyz, which is about the node. It answers from what was
// reported.
func (m *Monitor) Health() http.Handler {
	alive := m.verdict(func() []string {
		if why := m.pulse.stopped(); why != "" {
			return []string{why}
		}
		return nil
	})
	ready := m.verdict(func() (lines []string) {
		for _, r := range m.unready() {
			lines = append(lines, r.line)
		}
		return lines
	})
	return pages{"/livez": alive, "/healthz": alive, "/readyz": ready}
}

// verdict answers with 200 where nothing is wrong, and else with 503 and what is.
func (m *Monitor) verdict(wrong func() []string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		m.mu.Lock()
		reasons := wrong()
		m.mu.Unlock()
		if len(reasons) == 0 {
			answer(w, http.StatusOK, "ok")
			return
		}
		answer(w, http.StatusServiceUnavailable, strings.Join(reasons, "\n"))
	}
}

// pages are the paths that a server has, to be read and nothing else.
type pages map[string]http.HandlerFunc

// ServeHTTP implements http.Handler.
func (p pages) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	page := p[r.URL.Path]
	switch {
	case page == nil:
		var paths []string
		for path := range p {
			paths = append(paths, path)
		}
		slices.Sort(paths)
		answer(w, http.StatusNotFound, "not found; there is "+strings.Join(paths, ", "))
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		w.Header().Set("Allow", "GET, HEAD")
		answer(w, http.StatusMethodNotAllowed, "only GET and HEAD are allowed")
	default:
		page(w, r)
	}
}

func answer(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	fmt.Fprintln(w, text)
}
