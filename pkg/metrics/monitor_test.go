// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"net/http"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
)

func TestZPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMonitor(metrics.Options{Version: "v1.2.3"})
		m.Settings(metrics.Settings{Flags: map[string]string{"resync-interval": "1m0s", "metrics-listen": "", "data-dir": "/a\nb", "v": "0"}})
		time.Sleep(26*time.Hour + 3*time.Minute + 16*time.Second)
		const warning = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.\n"
		for path, want := range map[string]string{
			"/statusz": "\nip-masq-reconciler statusz\n" + warning + "\nStarted: Sat Jan  1 00:00:00 UTC 2000\nUp: 26 hr 03 min 16 sec\nGo version: " +
				runtime.Version() + "\nBinary version: v1.2.3\nPaths: /flagz /healthz /livez /readyz /statusz\n",
			"/flagz": "\nip-masq-reconciler flagz\n" + warning + "\ndata-dir=\"/a\\nb\"\nmetrics-listen=\nresync-interval=1m0s\nv=0\n",
		} {
			w := get(m.Health(), path)
			if diff := cmp.Diff(want, w.Body.String()); diff != "" || w.Code != http.StatusOK {
				t.Errorf("%s: %d (-want +got):\n%s", path, w.Code, diff)
			}
			if h := w.Header(); h.Get("Content-Type") != "text/plain; charset=utf-8" || h.Get("Cache-Control") != "no-store" {
				t.Errorf("%s has headers %v", path, h)
			}
		}
	})
}
