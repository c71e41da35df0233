// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

const (
	loadPods = 60 // that start together
	agentDir = "/etc/ip-masq/agent"
)

// TestLoad starts 60 pods together while a reconciler runs. When a third of them have their ADD, the
// ConfigMap gets one more prefix; at two thirds the reconciler is killed and started again. It
// checks that all start and end, and their verdicts.
func TestLoad(t *testing.T) {
	t.Logf("%d pods on each of three backends: one to two minutes on two idle cores", loadPods)
	for _, f := range forms() {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			n.version = "1.1.0"
			l := &load{&criNode{n, containerd.New(t, n.Machine, containerd.Options{Env: []string{"PATH=" + programDir}})}}
			l.run(t)
		})
	}
}

// load is a node on which many pods start together.
type load struct{ *criNode }

func (l *load) run(t *testing.T) {
	t.Helper()
	keys := "nonMasqueradeCIDRs:\n- 10.0.0.0/8\n"
	l.configMap(t, 1, keys)
	l.conflist(t, bridge(), l.entry(prefixes()))
	r := l.reconciler(t, programDir, l.settings()...)
	l.soonReady(t, r)
	l.ready(t, true)
	alone := l.pod(t, "alone")
	rules := l.rules(t)

	pods, started := l.together(t)
	l.untilADDs(t, 1+loadPods/3)
	l.configMap(t, 2, keys+"- 198.18.0.0/15\n")
	l.untilADDs(t, 1+loadPods*2/3)
	must(t, r.Kill())
	if l.attachments(t) > loadPods {
		t.Errorf("the reconciler was killed after the last ADD")
	}
	r = l.reconciler(t, programDir, l.settings()...)
	must(t, started())
	l.soonReady(t, r)
	l.wantInSync(t)
	pods = append(pods, alone)
	for _, p := range pods {
		host := l.adopt(t, p.Netns)
		l.verdicts(t, host, p.Addrs)
		seen := assert.Must(host.SendUDP(netip.MustParseAddrPort("198.18.0.1:7")))(t)
		if !slices.Contains(p.Addrs, seen.Source.Addr()) {
			t.Errorf("pod %s: 198.18.0.1 saw %s, want one of %s", p.Name, seen.Source, p.Addrs)
		}
	}
	l.wantAttachments(t, len(pods))

	l.configMap(t, 3, keys)
	var ends sync.WaitGroup
	for _, p := range pods {
		ends.Go(func() {
			if err := errors.Join(p.Stop(t.Context()), p.Remove(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
	ends.Wait()
	l.wantAttachments(t, 0)
	l.wantInSync(t)
	assert.Equal(t, "rules", l.rules(t), rules)
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
