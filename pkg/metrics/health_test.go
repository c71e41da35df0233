// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

func TestHealth(t *testing.T) {
	type answer struct {
		Code int
		Text string
	}
	ok := answer{200, "ok\n"}
	bad := &reconcile.Report{Problems: []reconcile.Problem{
		{Reason: reconcile.ReasonSource, Err: fmt.Errorf("%s\n%s", "first", "second\n")},
		{Reason: reconcile.ReasonRules, Err: errors.New("third")},
	}}
	for name, test := range map[string]struct {
		report      *reconcile.Report
		after       time.Duration
		live, ready answer
	}{
		"at the beginning":        {nil, 3 * time.Minute, ok, answer{503, "rules: no sync was made yet\n"}},
		"no sync at all":          {nil, time.Hour, answer{503, "no sync was made for 1h0m0s, and one is due every 1m0s\n"}, answer{503, "rules: no sync was made yet\n"}},
		"a sync without problems": {&reconcile.Report{}, 60 * time.Second, ok, ok},
		"problems":                {bad, time.Second, ok, answer{503, "source: first\n  second\nrules: third\n"}},
		"dead": {bad, 61 * time.Second, answer{503, "no sync was made for 1m1s, and one is due every 10s\n"},
			answer{503, "rules: no sync was made for 1m1s, and one is due every 10s\nsource: first\n  second\nrules: third\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMonitor(metrics.Options{})
				if test.report != nil {
					m.Report(test.report, 10*time.Second)
				}
				time.Sleep(test.after)
				ready := "0"
				if test.ready == ok {
					ready = "1"
				}
				expect(t, m, map[string]string{"ready": ready})
				for path, want := range map[string]answer{"/livez": test.live, "/healthz": test.live, "/readyz": test.ready} {
					w := get(m.Health(), path)
					assert.Equal(t, path, answer{w.Code, w.Body.String()}, want)
				}
			})
		})
	}
}

func TestRequests(t *testing.T) {
	m := newMonitor(metrics.Options{})
	health, metrics := httptest.NewServer(m.Health()), httptest.NewServer(m.Metrics())
	defer health.Close()
	defer metrics.Close()
	for _, test := range []struct {
		method, url string
		code        int
		text        string
	}{
		{"GET", health.URL + "/livez", 200, "ok\n"},
		{"GET", health.URL + "/livez?verbose", 200, "ok\n"},
		{"HEAD", health.URL + "/livez", 200, ""},
		{"HEAD", health.URL + "/readyz", 503, ""},
		{"POST", health.URL + "/livez", 405, "Method Not Allowed\n"},
		{"GET", health.URL + "/", 404, "404 page not found\n"},
		{"GET", health.URL + "/metrics", 404, "404 page not found\n"},
		{"DELETE", metrics.URL + "/metrics", 405, "Method Not Allowed\n"},
		{"GET", metrics.URL + "/livez", 404, "404 page not found\n"},
		{"HEAD", metrics.URL + "/metrics", 200, ""},
	} {
		t.Run(test.method+" "+test.url[strings.LastIndexByte(test.url, '/'):], func(t *testing.T) {
			req := assert.Must(http.NewRequestWithContext(t.Context(), test.method, test.url, nil))(t)
			resp := assert.Must(http.DefaultClient.Do(req))(t)
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != test.code || string(body) != test.text {
				t.Errorf("%d %q, %v; want %d %q", resp.StatusCode, body, err, test.code, test.text)
			}
			h := resp.Header
			if h.Get("Cache-Control") != "no-store" || !strings.HasPrefix(h.Get("Content-Type"), "text/plain;") || !strings.Contains(h.Get("Content-Type"), "charset=utf-8") {
				t.Errorf("headers %v", h)
			}
			if (h.Get("Allow") == "GET, HEAD") != (test.code == 405) {
				t.Errorf("Allow: %q", h.Get("Allow"))
			}
		})
	}
}
