// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestTwoReconcilers checks that the second reconciler is a standby, reports that, and becomes the
// leader after the first has ended by SIGTERM or SIGKILL.
func TestTwoReconcilers(t *testing.T) {
	t.Parallel()
	ends := map[string]func(*daemon, *testing.T){"by SIGTERM": (*daemon).stop, "by SIGKILL": (*daemon).kill}
	for how, end := range ends {
		t.Run("the first ends "+how, func(t *testing.T) {
			w := newTamperNode(t, backends()[0])
			commits, state := w.Count(), w.documentStamps(t)
			second := w.startReconciler(t, "--resync-interval", "10m")
			says := second.untilUnready(t, "standby: ", "another ip-masq-reconciler runs on this node")
			t.Logf("/readyz of the second: %s", says)
			for _, page := range []string{"/livez", "/healthz"} {
				if code, body, err := second.get(second.healthAddress, page); code != 200 || err != nil {
					t.Errorf("%s of the second: %d %s %v", page, code, body, err)
				}
			}
			if second.metric(t, "ready") != 0 || w.metric(t, "ready") != 1 {
				t.Error("the metric ready is not 0 on the standby and 1 on the leader")
			}
			if all := second.notReadyReasons(t); !slices.Equal(all, []string{"standby"}) {
				t.Errorf("the second has reasons %q", all)
			}
			time.Sleep(2 * time.Second) // the standby retries each second
			// The first line has the settings.
			if n := strings.Count(second.log(), "another ip-masq-reconciler runs"); n != 1 || strings.Count(second.log(), "\n") != 2 {
				t.Errorf("the standby reports it %d times, want once:\n%s", n, second.log())
			}
			w.wantActive(t, w.daemon) // the socket stays with the first
			if code, body := w.ready(); code != 200 {
				t.Errorf("the first is not ready: %d %s", code, body)
			}
			if late := w.Since(commits); len(late) > 0 || w.documentStamps(t) != state {
				t.Errorf("the second wrote: %v\n%s\nwere\n%s", late, w.documentStamps(t), state)
			}

			// The leader repairs the rules; the standby does nothing.
			way := tamperings()[0]
			before := second.log()
			w.spoil(t, way, 0)
			w.repair(t, commits)
			if said := second.since(before); said != "" {
				t.Errorf("the standby logged:\n%s", said)
			}

			// The rules stay while no reconciler runs.
			commits = w.Count()
			end(w.daemon, t)
			start := time.Now()
			second.until(t, "taking over", func() bool { code, _ := second.ready(); return code == 200 })
			t.Logf("the second took over after %s", time.Since(start).Round(time.Millisecond))
			if late := w.Since(commits); len(late) > 0 {
				t.Errorf("taking over rewrote rules in sync: %v", late)
			}
			w.daemon = second
			w.wantActive(t, second)
			w.spoil(t, way, 0)
			w.repair(t, commits)
			w.checkVerdicts(t)
			second.until(t, "repair in the log of the second", func() bool { return strings.Contains(second.log(), "repaired rules") })
		})
	}
}

// notReadyReasons returns the reasons for which the metric not_ready is 1.
func (d *daemon) notReadyReasons(t *testing.T) (all []string) {
	t.Helper()
	for line := range strings.Lines(d.scrape(t)) {
		if rest, is := strings.CutPrefix(line, `ip_masq_not_ready{reason="`); is && strings.HasSuffix(rest, " 1\n") {
			reason, _, _ := strings.Cut(rest, `"`)
			all = append(all, reason)
		}
	}
	return all
}

// since returns what was logged after an earlier log.
func (d *daemon) since(before string) string { return strings.TrimPrefix(d.log(), before) }

// saysStopped reports whether the log has since had one line, the last one of a reconciler that ends by SIGTERM.
func (d *daemon) saysStopped(before string) bool {
	said := d.since(before)
	return strings.Count(said, "\n") == 1 && strings.Contains(said, `msg=stopped reason="terminated signal received"`)
}

// TestSIGHUP checks that SIGHUP starts a sync at once. With iptables-legacy no event starts one.
func TestSIGHUP(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.agentFile(t, "ip-masq-of-mine", "{}\n")
		d := n.startReconciler(t, "--resync-interval", "10m").untilReady(t)
		time.Sleep(100 * time.Millisecond) // for syncs of the start
		log, syncs := d.log(), d.metric(t, "reconciles_total")
		d.signal(t, syscall.SIGHUP)
		d.until(t, "sync", func() bool { return d.metric(t, "reconciles_total") > syncs })
		if said := d.since(log); said != "" {
			t.Errorf("the sync found no drift; the log has:\n%s", said)
		}
		if n.backend.variant != "legacy" {
			return
		}
		n.flush(t)
		time.Sleep(500 * time.Millisecond)
		n.wantJumps(t, "IP-MASQ-AGENT", 0, 0)
		start := time.Now()
		d.signal(t, syscall.SIGHUP)
		d.until(t, "repair", func() bool { ipv4, _ := n.jumps(t, "IP-MASQ-AGENT"); return len(ipv4) == 1 })
		t.Logf("repaired and seen %s after SIGHUP", time.Since(start).Round(time.Millisecond))
	})
}
