// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// readiness fails the test unless /readyz answers this.
func readiness(t *testing.T, m *metrics.Monitor, want string) {
	t.Helper()
	w := get(m.Health(), "/readyz")
	if (w.Code == http.StatusOK) != (want == "ok\n") || w.Body.String() != want {
		t.Errorf("/readyz: %d %q, want %q", w.Code, w.Body, want)
	}
}

func TestManagedConflist(t *testing.T) {
	m := newMonitor(metrics.Options{})
	report := func(c *conflist.Status, problems ...reconcile.Problem) {
		m.Report(&reconcile.Report{Sources: missing(), Conflist: c, Problems: problems}, time.Minute)
	}
	readiness(t, m, "rules: no sync was made yet\n")
	report(&conflist.Status{}, reconcile.Problem{Reason: reconcile.ReasonConflist, Err: errors.New("waiting\nfor it")})
	readiness(t, m, "conflist: waiting\n  for it\n")
	expect(t, m, map[string]string{"ready": "0", "conflist_present": "0", "conflist_flapping": "0", "conflist_repairs_total": "0"})
	report(&conflist.Status{Present: true, Inserted: 1})
	readiness(t, m, "ok\n")
	expect(t, m, map[string]string{"ready": "1", "conflist_present": "1", "conflist_flapping": "0", "conflist_repairs_total": "1"})
	report(&conflist.Status{Flapping: true, Inserted: 2})
	expect(t, m, map[string]string{"conflist_present": "0", "conflist_flapping": "1", "conflist_repairs_total": "3", "conflist_entry_differs": "0"})
	report(&conflist.Status{Present: true, Findings: []conflist.Finding{{ID: conflist.EntryDiffers, Message: "in guard"}}})
	expect(t, m, map[string]string{"ready": "1", "conflist_entry_differs": "1"})
	if found := m.Status().ConflistFindings; len(found) != 1 || found[0] != (conflist.Finding{ID: "entry-differs", Message: "in guard"}) {
		t.Error(found)
	}

	// Where nobody here manages it any more, the sources tell; the counter stays.
	report(nil)
	expect(t, m, map[string]string{"conflist_present": "0", "conflist_flapping": "", "conflist_repairs_total": "3"})
	r := rich()
	r.Problems = nil
	m.Report(r, time.Minute)
	expect(t, m, map[string]string{"conflist_present": "1"})
}
