// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"errors"
	"testing"
	"time"
)

// TestReconcilerFindings has the situations of the node's reconciler. Without a look at it
// there is no finding.
func TestReconcilerFindings(t *testing.T) {
	for _, tc := range []struct {
		name string
		r    *Running
		set  func(*testHost)
		want map[string]string
	}{
		{name: "not looked at"},
		{name: "one that answers", r: &Running{Active: true}},
		{name: "none", r: &Running{Seen: time.Now().Add(-time.Hour)},
			want: map[string]string{"problem reconciler-not-running": `no process holds the instance lock of "/data", 1h0m ago, systemctl start`}},
		{name: "none ever, beside the plugin", r: &Running{}, want: map[string]string{"notice reconciler-not-running": "none has run"}},
		{name: "none ever, and nothing to keep", r: &Running{}, set: func(h *testHost) {
			h.edit = func(n *Host) { n.State.Sources = nil }
		}},
		{name: "one that hangs", r: &Running{Active: true, Err: errors.New("no answer in 2s")},
			want: map[string]string{"problem reconciler-not-answering": "no answer in 2s; look on the host, kill -CONT PID"}},
		{name: "one that keeps the plugin entry, whose faults say what keeps it from that", r: &Running{Active: true, ManagesConflist: true},
			set: func(h *testHost) { h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", bridge) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newHost(t)
			if tc.set != nil {
				tc.set(h)
			}
			edit := h.edit
			h.edit = func(n *Host) {
				n.Reconciler, n.DataDir = tc.r, "/data"
				if edit != nil {
					edit(n)
				}
			}
			compare(t, tc.want, h.examine())
		})
	}
}
