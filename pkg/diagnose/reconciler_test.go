// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// runs adds a process of the reconciler in this network namespace.
func (h *testHost) runs(pid string, args ...string) {
	h.files["proc/self/ns/net"] = "-> net:[1]"
	h.files["proc/"+pid+"/ns/net"] = "-> net:[1]"
	h.files["proc/"+pid+"/comm"] = "ip-masq-reconci\n"
	h.files["proc/"+pid+"/cmdline"] = strings.Join(append([]string{"/bin/ip-masq-reconciler"}, args...), "\x00") + "\x00"
}

// TestReconcilerFindings has the situations of the node's reconciler. Without a look at it
// there is no finding.
func TestReconcilerFindings(t *testing.T) {
	for _, tc := range []struct {
		name string
		r    *Running
		set  func(*testHost)
		want map[string]string
	}{
		{name: "not looked at", set: func(h *testHost) { h.runs("7"); h.runs("9") }},
		{name: "one that answers", r: &Running{Active: true, Answers: true}, set: func(h *testHost) { h.runs("7", "run") }},
		{name: "one that answers, and commands", r: &Running{Active: true, Answers: true}, set: func(h *testHost) {
			h.runs("7")
			h.runs("9", "doctor", "-o", "json")
			h.runs("10", "run")
			h.files["proc/10/ns/net"] = "-> net:[2]" // of another node on this host
		}},
		{name: "none", r: &Running{Seen: time.Now().Add(-time.Hour)},
			want: map[string]string{"problem reconciler-not-running": `no process holds the instance lock of "/data", 1h0m ago, systemctl start`}},
		{name: "none ever, beside the plugin", r: &Running{}, want: map[string]string{"notice reconciler-not-running": "none has run"}},
		{name: "none ever, and nothing to keep", r: &Running{}, set: func(h *testHost) {
			h.edit = func(n *Host) { n.State.Sources = nil }
		}},
		{name: "one without the lock", r: &Running{Seen: time.Now()}, set: func(h *testHost) { h.runs("7", "--data-dir=/other") },
			want: map[string]string{"problem reconciler-data-dir": `process 7 ("/bin/ip-masq-reconciler --data-dir=/other") runs and does not hold, use one directory`}},
		{name: "a process of another user, who can name it as he likes", r: &Running{Seen: time.Now().Add(-time.Hour)}, set: func(h *testHost) {
			h.runs("9", "--data-dir=/other")
			h.edit = func(n *Host) {
				if err := os.Chown(filepath.Join(n.Root, "proc/9"), 65534, 65534); err != nil {
					h.t.Fatal(err)
				}
			}
		}, want: map[string]string{"problem reconciler-not-running": `no process holds the instance lock of "/data"`}},
		{name: "one that hangs", r: &Running{Active: true}, set: func(h *testHost) { h.runs("7", "run") },
			want: map[string]string{"problem reconciler-not-answering": "process 7, kill -CONT PID"}},
		{name: "one that hangs where no process is seen", r: &Running{Active: true},
			want: map[string]string{"problem reconciler-not-answering": "look on the host"}},
		{name: "one that keeps the plugin entry, whose faults say what keeps it from that", r: &Running{Active: true, Answers: true, ManagesConflist: true},
			set: func(h *testHost) { h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", bridge) }},
		{name: "a busy address", r: &Running{Active: true, Answers: true, Unserved: map[string]string{
			"metrics_listen": `listen tcp :9820: address already in use by "nginx" (pid 12)`}},
			want: map[string]string{"problem listen-address-busy": `metrics_listen: listen tcp :9820, "nginx" (pid 12)`}},
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
