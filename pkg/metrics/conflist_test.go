// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"errors"
	"net/http"
	"testing"
	"time"

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
	m := metrics.New(metrics.Options{})
	waiting := &metrics.Conflist{Problems: []reconcile.Problem{{Reason: reconcile.ReasonConflist, Err: errors.New("waiting\nfor it")}, {Reason: reconcile.ReasonPlugin, Err: errors.New("no plugin")}}}
	m.Conflist(waiting)
	readiness(t, m, "rules: no sync was made yet\n")
	m.Report(&reconcile.Report{Sources: missing(), Problems: []reconcile.Problem{{Reason: reconcile.ReasonRules, Err: errors.New("x")}}}, time.Minute)
	readiness(t, m, "rules: x\nconflist: waiting\n  for it\nplugin: no plugin\n")
	expect(t, m, map[string]string{"ready": "0", "conflist_present": "0", "conflist_flapping": "0", "conflist_repairs_total": "0"})

	// What it says holds at once, and passes do not take it back.
	m.Conflist(&metrics.Conflist{Present: true, Wrote: true})
	m.Report(&reconcile.Report{Sources: missing()}, time.Minute)
	readiness(t, m, "ok\n")
	expect(t, m, map[string]string{"ready": "1", "conflist_present": "1", "conflist_flapping": "0", "conflist_repairs_total": "1"})
	m.Conflist(&metrics.Conflist{Flapping: true, Problems: []reconcile.Problem{{Reason: reconcile.ReasonConflist, Err: errors.New("reverted")}}})
	readiness(t, m, "conflist: reverted\n")
	expect(t, m, map[string]string{"ready": "0", "conflist_present": "0", "conflist_flapping": "1", "conflist_repairs_total": "1"})

	// Where nobody here manages it any more, passes tell; the counter stays.
	m.Conflist(nil)
	readiness(t, m, "ok\n")
	expect(t, m, map[string]string{"ready": "1", "conflist_present": "0", "conflist_flapping": "", "conflist_repairs_total": "1"})
	r := rich()
	r.Problems = nil
	m.Report(r, time.Minute)
	expect(t, m, map[string]string{"conflist_present": "1"})
}
