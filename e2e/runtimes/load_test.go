// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

const (
	loadPods  = 60 // that start together
	alonePods = 5  // that start one after the other
	agentDir  = "/etc/ip-masq/agent"
	scaleFile = "../../docs/scale.md"
)

// TestLoad starts 60 pods together while a reconciler runs. When a third of them have their ADD, the
// ConfigMap gets one more prefix; at two thirds the reconciler is killed and started again. It
// checks that no call fails, and the verdicts of all pods, and deletes the pods together. With
// -update it writes the share of ADD in a pod's start to docs/scale.md.
func TestLoad(t *testing.T) {
	t.Logf("%d pods on each of three backends: one to two minutes on two idle cores", loadPods)
	table := [][]string{{"measured on one node"}}
	var version string
	for _, f := range forms() {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			n.version = "1.1.0"
			l := &load{criNode: &criNode{node: n}, calls: n.timed(t)}
			l.Runtime = containerd.New(t, n.Machine, containerd.Options{Env: []string{"PATH=" + programDir}})
			version = l.Version
			column := append([]string{f.name}, l.run(t)...)
			for i, cell := range column {
				if len(table) == i {
					table = append(table, []string{loadRows()[i-1]})
				}
				table[i] = append(table[i], cell)
			}
		})
	}
	if !t.Failed() {
		writeScale(t, version, table)
	}
}

// load is a node on which many pods start together.
type load struct {
	*criNode
	calls func() []timedCall
}

// run returns the cells of loadRows.
func (l *load) run(t *testing.T) []string {
	t.Helper()
	keys := "nonMasqueradeCIDRs:\n- 10.0.0.0/8\n"
	l.configMap(t, 1, keys)
	l.conflist(t, bridge(), l.entry(prefixes()))
	r := l.reconciler(t, programDir, l.settings()...)
	l.soonReady(t, r)
	l.ready(t, true)
	var alone []*containerd.Pod
	for i := range alonePods {
		alone = append(alone, l.pod(t, fmt.Sprint("alone", i)))
	}
	rules := l.rules(t)
	aloneStarts := l.starts(t, alone, l.calls())

	began := time.Now()
	pods, started := l.together(t)
	l.untilADDs(t, alonePods+loadPods/3)
	l.configMap(t, 2, keys+"- 198.18.0.0/15\n")
	l.untilADDs(t, alonePods+loadPods*2/3)
	must(t, r.Kill())
	at := l.attachments(t) - alonePods
	r = l.reconciler(t, programDir, l.settings()...)
	if err := started(); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	if at >= loadPods {
		t.Errorf("the reconciler was killed after the last ADD")
	}
	starts := l.starts(t, pods, l.calls())
	l.soonReady(t, r)
	l.wantInSync(t)
	for _, p := range append(slices.Clone(alone), pods...) {
		host := l.adopt(t, p.Netns)
		l.verdicts(t, host, p.Addrs)
		seen := topology.Must(host.SendUDP(netip.MustParseAddrPort("198.18.0.1:7")))(t)
		if !slices.Contains(p.Addrs, seen.Source.Addr()) {
			t.Errorf("pod %s: 198.18.0.1 saw %s, want one of %s", p.Name, seen.Source, p.Addrs)
		}
	}
	l.wantAttachments(t, alonePods+loadPods)

	l.configMap(t, 3, keys)
	var ends sync.WaitGroup
	for _, p := range append(alone, pods...) {
		ends.Go(func() {
			if err := errors.Join(p.Stop(t.Context()), p.Remove(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
	ends.Wait()
	l.succeeded(t, l.calls(), "DEL", 2*(alonePods+loadPods))
	l.wantAttachments(t, 0)
	l.wantInSync(t)
	if now := l.rules(t); now != rules {
		t.Errorf("rules:\n%s\nwant those of before:\n%s", now, rules)
	}
	t.Logf("%d of %d pods had their ADD when the reconciler was killed; all ran after %s", at, loadPods, took)
	if limit := 2 * time.Second; timelimit.Exceeded(starts.add.quantile(0.5), limit) {
		t.Errorf("the median ADD took %s, limit %s", starts.add.quantile(0.5), limit)
	}
	return append(aloneStarts.cells(), append(starts.cells(), fmt.Sprintf("%.1f s", took.Seconds()))...)
}

func (l *load) settings() []string {
	return []string{"--agent-config-dir", agentDir, "--backend", l.form.backend}
}

// configMap replaces the agent file as kubelet does: it is a link into a directory that the link
// ..data names.
func (l *load) configMap(t *testing.T, version int, text string) {
	t.Helper()
	name := fmt.Sprint("..version", version)
	must(t, l.WriteFile(filepath.Join(agentDir, name, "ip-masq-agent"), text, 0o644))
	dir := l.Path(agentDir)
	must(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
	must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	if version == 1 {
		must(t, os.Symlink("..data/ip-masq-agent", filepath.Join(dir, "ip-masq-agent")))
	}
}

// together starts the pods; started waits for them.
func (l *load) together(t *testing.T) (pods []*containerd.Pod, started func() error) {
	t.Helper()
	pods = make([]*containerd.Pod, loadPods)
	errs := make([]error, loadPods)
	var starts sync.WaitGroup
	for i := range pods {
		starts.Go(func() { pods[i], errs[i] = l.RunPod(t.Context(), fmt.Sprintf("pod%02d", i)) })
	}
	return pods, func() error {
		starts.Wait()
		return errors.Join(errs...)
	}
}

// untilADDs waits until this number of attachments is on record.
func (l *load) untilADDs(t *testing.T, count int) {
	t.Helper()
	until(t, 5*time.Minute, fmt.Sprint(count, " ADDs"), func() bool { return l.attachments(t) >= count })
}

// wantInSync waits until the rules and the sources are in sync.
func (l *load) wantInSync(t *testing.T) {
	t.Helper()
	var output string
	var code int
	if !timelimit.Await(5*time.Second, func() bool {
		output, code = l.reconcile(t, append([]string{"check", "--enable-ipv6"}, l.settings()...)...)
		return code == 0
	}) {
		t.Errorf("check: exit code %d: %s", code, output)
	}
}

// timedCall is a call of a network plugin.
type timedCall struct {
	plugin, verb, id string
	took             time.Duration
	code             int
}

// timed replaces the plugins of the network, and the loopback plugin that containerd calls, by
// scripts that record each call. calls returns those since the previous time.
func (n *node) timed(t *testing.T) (calls func() []timedCall) {
	t.Helper()
	const log, realDir = "/var/log/plugins", "/opt/cni/real"
	must(t, os.Mkdir(n.Path(realDir), 0o755))
	for _, plugin := range []string{"loopback", "bridge", "ip-masq"} {
		must(t, os.Rename(n.Path(filepath.Join(binDir, plugin)), n.Path(filepath.Join(realDir, plugin))))
		must(t, n.WriteFile(filepath.Join(binDir, plugin), fmt.Sprintf(`#!/bin/bash
start=${EPOCHREALTIME/./}
%[1]s/%[2]s
code=$?
echo "%[2]s ${CNI_COMMAND:--} ${CNI_CONTAINERID:--} $((${EPOCHREALTIME/./} - start)) $code" >>%[3]s
exit $code
`, realDir, plugin, log), 0o755))
	}
	return func() (all []timedCall) {
		t.Helper()
		text, err := os.ReadFile(n.Path(log))
		must(t, err)
		must(t, os.Truncate(n.Path(log), 0))
		for line := range strings.Lines(string(text)) {
			var c timedCall
			var microseconds int64
			if _, err := fmt.Sscan(line, &c.plugin, &c.verb, &c.id, &microseconds, &c.code); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			c.took = time.Duration(microseconds) * time.Microsecond
			all = append(all, c)
		}
		return all
	}
}

// succeeded checks that no call failed, and the number of calls of ip-masq with the verb.
func (l *load) succeeded(t *testing.T, calls []timedCall, verb string, want int) {
	t.Helper()
	count := 0
	for _, c := range calls {
		if c.code != 0 {
			t.Errorf("%s of %s for %s: exit code %d", c.verb, c.plugin, c.id, c.code)
		}
		if c.plugin == "ip-masq" && c.verb == verb {
			count++
		}
	}
	if count != want {
		t.Errorf("%d calls of %s, want %d", count, verb, want)
	}
}

// durations are measurements, one for each pod.
type durations []time.Duration

func (d durations) quantile(q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(d))
	return sorted[int(q*float64(len(sorted)-1)+0.5)]
}

func (d durations) String() string {
	return fmt.Sprintf("%d [%d–%d]", d.quantile(0.5).Milliseconds(), d.quantile(0.05).Milliseconds(), d.quantile(0.95).Milliseconds())
}

// podStarts are the parts of the starts of pods.
type podStarts struct {
	whole   durations // from CRI's request to its answer
	plugins durations // the ADDs of all plugins, one after the other
	add     durations // the ADD of ip-masq
}

func loadRows() []string {
	var rows []string
	for _, when := range []string{"one after the other", fmt.Sprint(loadPods, " at once")} {
		for _, what := range []string{"start of a pod, ms", "ADD of all plugins, ms", "ADD of ip-masq, ms", "ADD of ip-masq, share of the start"} {
			rows = append(rows, when+": "+what)
		}
	}
	return append(rows, fmt.Sprintf("until all %d pods run", loadPods))
}

func (s podStarts) cells() []string {
	var share []float64
	for i := range s.whole {
		share = append(share, 100*float64(s.add[i])/float64(s.whole[i]))
	}
	slices.Sort(share)
	return []string{s.whole.String(), s.plugins.String(), s.add.String(), fmt.Sprintf("%.1f %%", share[len(share)/2])}
}

// starts returns the parts of the pods' starts from containerd's log and the plugins' calls, which
// must be one successful ADD for each pod.
func (l *load) starts(t *testing.T, pods []*containerd.Pod, calls []timedCall) podStarts {
	t.Helper()
	l.succeeded(t, calls, "ADD", len(pods))
	var s podStarts
	log := l.Daemon.Output()
	for _, p := range pods {
		lines := regexp.MustCompile(`time="(\S+)" .*RunPodSandbox for name:\\"`+p.Name+`\\"`).FindAllStringSubmatch(log, -1)
		if len(lines) != 2 {
			t.Fatalf("containerd's log has %d lines of the start of pod %s", len(lines), p.Name)
		}
		began, err := time.Parse(time.RFC3339Nano, lines[0][1])
		must(t, err)
		ended, err := time.Parse(time.RFC3339Nano, lines[1][1])
		must(t, err)
		var plugins, add time.Duration
		for _, c := range calls {
			if c.id != p.ID || c.verb != "ADD" {
				continue
			}
			plugins += c.took
			if c.plugin == "ip-masq" {
				add = c.took
			}
		}
		s.whole, s.plugins, s.add = append(s.whole, ended.Sub(began)), append(s.plugins, plugins), append(s.add, add)
	}
	return s
}

// writeScale logs the table, and writes it to docs/scale.md with -update.
func writeScale(t *testing.T, version string, table [][]string) {
	t.Helper()
	var b strings.Builder
	for i, row := range table {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			fmt.Fprintf(&b, "|---%s|\n", strings.Repeat("|---:", len(row)-1))
		}
	}
	t.Logf("\n%s", b.String())
	if !golden.Updating() {
		return
	}
	var name unix.Utsname
	must(t, unix.Uname(&name))
	release, _, _ := bytes.Cut(name.Release[:], []byte{0})
	text, err := os.ReadFile(scaleFile)
	must(t, err)
	const begin, end = "<!-- load: TestLoad -update writes what follows -->\n", "<!-- end of load -->\n"
	head, rest, hasBegin := strings.Cut(string(text), begin)
	_, tail, hasEnd := strings.Cut(rest, end)
	if !hasBegin || !hasEnd {
		t.Fatalf("%s has no place for the table", scaleFile)
	}
	version, _, _ = strings.Cut(version, "+")
	updated := fmt.Sprintf("%s%s\n%s\n%s: Linux %s (%s), %d processors, containerd %s.\n\n%s%s", head, begin, b.String(),
		time.Now().Format(time.DateOnly), release, runtime.GOARCH, runtime.NumCPU(), version, end, tail)
	must(t, os.WriteFile(scaleFile, []byte(updated), 0o644))
}
