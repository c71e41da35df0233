// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// reconcilerProgram returns the path of the built reconciler.
func reconcilerProgram(t *testing.T) string {
	t.Helper()
	path := filepath.Join(topology.BinDir(t), "ip-masq-reconciler")
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v (`make build` builds it)", err)
	}
	return path
}

// agentDir is the directory of the node's agent files. It does not exist before the first file is
// written; until then startReconciler syncs no such directory and there is no agent source.
func (n *node) agentDir() string { return filepath.Join(n.dir, "agent") }

// agentFile writes an agent file atomically, as an editor does.
func (n *node) agentFile(t *testing.T, name, text string) {
	t.Helper()
	next := filepath.Join(n.dir, "next-agent-file") // outside agentDir, where the reconciler would read it
	if err := errors.Join(
		os.MkdirAll(n.agentDir(), 0o755),
		os.WriteFile(next, []byte(text), 0o644),
		os.Rename(next, filepath.Join(n.agentDir(), name)),
	); err != nil {
		t.Fatal(err)
	}
}

// reconcilerCommand prepares a command of the reconciler with the node's directories, the backend's
// backend and PATH. Flags in args override these.
func (n *node) reconcilerCommand(ctx context.Context, t *testing.T, args ...string) *topology.Cmd {
	t.Helper()
	all := []string{"--data-dir", n.dataDir, "--cni-conf-dir", n.cni.ConfDir, "--cni-bin-dir", n.cni.Path[0], "--backend", n.backend.setting}
	if _, err := os.Stat(n.agentDir()); err == nil {
		all = append(all, "--agent-config-dir", n.agentDir())
	}
	all = slices.Concat(n.prefix, []string{reconcilerProgram(t)}, all, args)
	c := n.Node.Command(ctx, all[0], all[1:]...)
	c.Env = []string{"PATH=" + n.path}
	return c
}

// reconciler runs a command of the reconciler to its end.
func (n *node) reconciler(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return run(t, n.reconcilerCommand(n.timeout(t), t, args...))
}

// warningsIn returns standard error without the line that says where the settings come from.
func warningsIn(stderr string) string {
	if first, rest, _ := strings.Cut(stderr, "\n"); strings.HasPrefix(first, "settings: ") {
		return rest
	}
	return stderr
}

// daemon is a running reconciler.
type daemon struct {
	n       *node
	command *topology.Cmd
	journal journal
	// Its listeners, in the node's network namespace.
	healthAddress, metricsAddress string
	ended                         chan struct{}
	result                        error // the exit error once the process has ended
	stopping                      sync.Once
}

// journal holds the standard error of a program.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(b)
}

// log returns the log so far.
func (d *daemon) log() string {
	d.journal.mu.Lock()
	defer d.journal.mu.Unlock()
	return d.journal.text.String()
}

// startReconciler starts `run` on the node and returns once /readyz reports the first sync. The
// test stops it by SIGTERM at its end and fails if the exit code is not 0.
func (n *node) startReconciler(t *testing.T, args ...string) *daemon {
	t.Helper()
	health, metrics := n.unusedAddress(), n.unusedAddress()
	// The test's context ends before its cleanups run.
	ctx, kill := context.WithCancel(context.WithoutCancel(t.Context()))
	d := &daemon{n: n, healthAddress: health, metricsAddress: metrics, ended: make(chan struct{})}
	all := append([]string{"run", "--health-listen", health, "--metrics-listen", metrics}, args...)
	d.command = n.reconcilerCommand(ctx, t, all...)
	d.command.Stdout, d.command.Stderr = &d.journal, &d.journal
	must(t, d.command.Start())
	go func() { defer close(d.ended); d.result = d.command.Wait() }()
	t.Cleanup(func() {
		d.stop(t)
		kill()
		if t.Failed() {
			t.Logf("log of reconciler %v:\n%s", args, abbreviate(d.log()))
		}
	})
	d.until(t, "a sync", func() bool {
		code, body := d.ready()
		return code != 0 && !strings.Contains(body, "no sync was made yet")
	})
	return d
}

// abbreviate removes the middle of a long text.
func abbreviate(text string) string {
	const end = 4000
	if len(text) <= 2*end {
		return text
	}
	return fmt.Sprintf("%s\n[… %d bytes …]\n%s", text[:end], len(text)-2*end, text[len(text)-end:])
}

// unusedAddress returns a loopback address that no other listener or client of the node uses.
func (n *node) unusedAddress() string {
	n.listeners++
	return fmt.Sprintf("127.0.0.1:%d", 20000+n.listeners)
}

// isReady reports whether the reconciler at an address of the node is ready.
func (n *node) isReady(address string) bool {
	code, _, err := n.Node.HTTPGet(context.Background(), "http://"+address+"/readyz")
	return err == nil && code == http.StatusOK
}

// get sends a request to one of the reconciler's listeners.
func (d *daemon) get(address, path string) (code int, body string, err error) {
	return d.n.Node.HTTPGet(context.Background(), "http://"+address+path)
}

// until waits until a condition holds. It fails the test after timelimit.Wait, or if the process
// ends.
func (d *daemon) until(t *testing.T, what string, is func() bool) {
	t.Helper()
	if !timelimit.Await(timelimit.Wait, func() bool {
		done := is()
		if !done && d.hasEnded() {
			t.Fatalf("the reconciler ended (%v) before %s:\n%s", d.result, what, d.log())
		}
		return done
	}) {
		_, ready := d.ready()
		t.Fatalf("no %s; /readyz: %s\nthe log:\n%s\nthe rules:\n%s", what, ready, abbreviate(d.log()), d.n.rules(t))
	}
}

// hasEnded reports whether the process has ended.
func (d *daemon) hasEnded() bool {
	select {
	case <-d.ended:
		return true
	default:
		return false
	}
}

// ready returns the answer of /readyz: 200, or 503 with the reasons; 0 without an answer.
func (d *daemon) ready() (code int, body string) {
	code, body, err := d.get(d.healthAddress, "/readyz")
	if err != nil {
		return 0, err.Error()
	}
	return code, body
}

// untilReady waits until the node is ready.
func (d *daemon) untilReady(t *testing.T) *daemon {
	t.Helper()
	d.until(t, "readiness", func() bool {
		code, _ := d.ready()
		return code == http.StatusOK
	})
	return d
}

// untilUnready waits until the node is not ready and /readyz contains these texts, and returns its
// body.
func (d *daemon) untilUnready(t *testing.T, says ...string) string {
	t.Helper()
	var body string
	d.until(t, fmt.Sprintf("unreadiness that says %q", says), func() bool {
		var code int
		code, body = d.ready()
		return code == http.StatusServiceUnavailable &&
			!slices.ContainsFunc(says, func(s string) bool { return !strings.Contains(body, s) })
	})
	return body
}

// scrape returns the answer of /metrics.
func (d *daemon) scrape(t *testing.T) string {
	t.Helper()
	var code int
	var body string
	var err error
	d.until(t, "/metrics", func() bool { // its address is bound beside that of /readyz, not before it
		code, body, err = d.get(d.metricsAddress, "/metrics")
		return !errors.Is(err, syscall.ECONNREFUSED)
	})
	if err != nil || code != http.StatusOK {
		t.Fatalf("/metrics: %d %v\n%s\n%s", code, err, body, d.log())
	}
	return body
}

// metric returns the sum of all series of a metric, named without its prefix, whose labels contain
// these texts, such as `result="repaired"`. It fails the test if there is none.
func (d *daemon) metric(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	body := d.scrape(t)
	sum, found := 0.0, false
	for line := range strings.Lines(body) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if at := strings.LastIndex(line, "} "); at >= 0 {
			series, value = line[:at+1], strings.TrimSpace(line[at+2:])
		}
		bare, _, _ := strings.Cut(series, "{")
		if bare != "ip_masq_"+name || slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(series, l) }) {
			continue
		}
		number, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("metric %q: %v", line, err)
		}
		sum, found = sum+number, true
	}
	if !found {
		t.Fatalf("no metric %s %v in:\n%s", name, labels, body)
	}
	return sum
}

// wantMetric fails the test unless a metric has a value.
func (d *daemon) wantMetric(t *testing.T, want float64, name string, labels ...string) {
	t.Helper()
	wantSame(t, strings.Join(append([]string{name}, labels...), " "), d.metric(t, name, labels...), want)
}

// signal sends a signal to the process.
func (d *daemon) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	must(t, d.command.Process.Signal(s))
	if s == syscall.SIGSTOP {
		d.until(t, "stop of every thread", d.stopped)
	}
}

// stopped reports whether all threads are in state T, proc_pid_stat(5), or ended.
func (d *daemon) stopped() bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", d.command.Process.Pid))
	return err == nil && !slices.ContainsFunc(threads, func(path string) bool {
		stat, err := os.ReadFile(path)
		return err == nil && !strings.Contains(string(stat), ") T ")
	})
}

// stop ends the process by SIGTERM. It fails the test if the process ended before, its exit code is
// not 0, or it takes longer than the grace period of a runtime.
func (d *daemon) stop(t *testing.T) {
	t.Helper()
	d.stopping.Do(func() {
		if d.hasEnded() {
			t.Errorf("the reconciler ended by itself: %v\n%s", d.result, d.log())
			return
		}
		start := time.Now()
		d.signal(t, syscall.SIGTERM)
		if !timelimit.Await(10*time.Second, d.hasEnded) {
			t.Errorf("the reconciler did not end within %s of SIGTERM:\n%s", time.Since(start), d.log())
			d.signal(t, syscall.SIGKILL)
			<-d.ended
			return
		}
		if code := d.command.ProcessState.ExitCode(); code != 0 {
			t.Errorf("exit code %d (%v) %s after SIGTERM:\n%s", code, d.result, time.Since(start), d.log())
		}
	})
}

// kill ends the process by SIGKILL, in place of stop.
func (d *daemon) kill(t *testing.T) {
	t.Helper()
	d.stopping.Do(func() {
		d.signal(t, syscall.SIGKILL)
		<-d.ended
	})
}
