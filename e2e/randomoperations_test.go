// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// TestPluginAndReconcilerAtOnce changes conflists, the ConfigMap and the rules at random while
// plugin and reconciler run. It checks that the rules end up as the last valid sources say, that no
// program has a difference left, and that no packet to an exempt destination is masqueraded. Every
// other run has a guard: there no packet leaves with a pod's address but to exempt destinations, and
// a third party's rule that masquerades those has no effect.
func TestPluginAndReconcilerAtOnce(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[:2] {
		t.Run(f.name, func(t *testing.T) {
			for i := range uint64(2) {
				guarded := i%2 == 1
				t.Run(fmt.Sprintf("seed %d, guarded %t", *seed+i, guarded), func(t *testing.T) { runRandomOperations(t, f, *seed+i, guarded) })
			}
		})
	}
}

// neverExempt has the first of 60 addresses of each family that no policy of a chaos test exempts.
var neverExempt = []netip.Addr{netip.MustParseAddr("1.2.3.0"), netip.MustParseAddr("2001:db8:100::")}

func runRandomOperations(t *testing.T, f backend, seed uint64, guarded bool) {
	t.Helper()
	operations := 200
	if guarded {
		operations = 100 // this run is an additional one
	}
	m := newChaosTest(t, newNode(t, f), seed, guarded)
	host := topology.Must(m.AddPod("transit", transit4, transit6))(t)
	destinations := slices.Concat(addrPorts(netip.MustParseAddr("10.9.0.0"), 60), addrPorts(netip.MustParseAddr("fd00:9::"), 60))
	if guarded {
		for i, pod := range host.Addrs {
			family := families()[i][1]
			m.feed(t, fmt.Sprintf("table %s other {\nchain post { type nat hook postrouting priority 100;\n%[1]s saddr %s %[1]s daddr %s masquerade\n}\n}\n", family, pod, exemptPrefixes[i]), "nft", "-f", "-")
			destinations = append(destinations, addrPorts(neverExempt[i], 60)...)
		}
	}
	load := topology.Must(host.StartLoad(destinations))(t)
	from := m.commits.Count()
	for range operations {
		m.randomOperation(t)
		time.Sleep(time.Duration(m.random.IntN(10)) * time.Millisecond)
	}
	m.waitForPlugins(t)
	report := topology.Must(load.Stop())(t)
	m.waitInSync(t)
	m.checkCommits(t, from, operations)
	wrong := 0
	for _, flow := range report.Flows {
		own, exempt := netip.AddrPortFrom(sender{addrs: host.Addrs}.addr(flow.To.Addr()), flow.From), isAlwaysExempt(flow.To.Addr())
		if exempt && flow.Source != own || !exempt && !m.isNodeAddr(flow.Source.Addr()) {
			if wrong++; wrong <= 5 {
				t.Errorf("to %s, always exempt %t: came from %s, was sent from %s", flow.To.Addr(), exempt, flow.Source, own)
			}
		}
	}
	if wrong > 0 || len(report.Flows) < 1000 {
		t.Errorf("%d of %d connections got the wrong verdict; want at least 1000 connections", wrong, len(report.Flows))
	}
	m.checkVerdicts(t, host)
	m.neitherReverts(t)
	t.Logf("-seed %d: %v, %d failed; %d connections; %s", seed, m.counts, len(m.failures), len(report.Flows), m.commits.countByProgram(from))
}

// TestConflistAndAddAtOnce writes a conflist and runs ADD right after, as a runtime may, while the
// reconciler reacts to the file. It checks that no program writes a rule once ADD has returned.
func TestConflistAndAddAtOnce(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[:2] {
		t.Run(f.name, func(t *testing.T) {
			t.Logf("-seed %d", *seed)
			m := newChaosTest(t, newNode(t, f), *seed, false)
			m.waitForSources(t)
			added := 0
			for i := range 30 {
				name := m.networks()[i%2]
				m.updateSource(t, name)
				time.Sleep(time.Duration(m.random.IntN(12)) * time.Millisecond)
				conf := m.conf(t, name, m.lastValid[name])
				began := m.generation(t)
				m.invoke(t, invocation{verb: "ADD", conf: conf, id: fmt.Sprint("added", i)}).want(t, 0)
				// The kernel's generation is exact; the commit watcher can receive a commit later.
				done := m.generation(t)
				added += int(done - began)
				m.daemon.eventuallyReady(t)
				time.Sleep(60 * time.Millisecond)
				if now := m.generation(t); now != done {
					t.Errorf("ADD %d of %s: %d commits after it: %s", i, name, now-done, m.commits.programsAfter(done))
				}
				m.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0).noWarnings(t)
			}
			if added == 0 {
				t.Error("the reconciler was always first, so ADD was not tested")
			}
			if drift := m.daemon.metric(t, "drift_repairs_total"); drift != 0 {
				t.Errorf("the reconciler counted changes of the plugin as drift %v times", drift)
			}
		})
	}
}

// randomOperation performs one operation. Verbs of the plugin run in the background.
func (m *chaosTest) randomOperation(t *testing.T) {
	t.Helper()
	switch kind := m.random.IntN(20); {
	case kind < 6:
		m.counts["ADD"]++
		m.pods++
		m.startPlugin(t, "ADD", fmt.Sprint("chaosTest", m.pods))
	case kind < 9:
		m.counts["DEL"]++
		m.startPlugin(t, "DEL", fmt.Sprint("chaosTest", m.random.IntN(m.pods+1)))
	case kind < 14:
		m.counts["conflist"]++
		m.editConflist(t)
	case kind < 17:
		m.counts["ConfigMap"]++
		m.editConfigMap(t)
	default:
		m.counts["tampering"]++
		m.tamper(t)
	}
}

// startPlugin starts a verb of the plugin with the current entry of a random network.
func (m *chaosTest) startPlugin(t *testing.T, verb, id string) {
	t.Helper()
	name := m.networks()[m.random.IntN(2)]
	c := m.prepare(t, invocation{verb: verb, conf: m.conf(t, name, m.lastValid[name]), id: id})
	var out, errs strings.Builder
	c.Stdout, c.Stderr = &out, &errs
	m.slots <- struct{}{}
	must(t, c.Start())
	m.pluginRuns.Go(func() {
		defer func() { <-m.slots }()
		_ = c.Wait() // the exit code is checked below
		m.mu.Lock()
		defer m.mu.Unlock()
		if c.ProcessState.ExitCode() != 0 {
			m.failures = append(m.failures, verb+": "+out.String()+errs.String())
		}
	})
}

// waitForPlugins waits for the running verbs. Only ADD may fail, and only if its rules were removed
// before it verified them.
func (m *chaosTest) waitForPlugins(t *testing.T) {
	t.Helper()
	m.pluginRuns.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	const fewest = 10 // of a hundred
	for _, failure := range m.failures {
		if !strings.HasPrefix(failure, "ADD: ") || !strings.Contains(failure, `"code": 100`) {
			t.Error(failure)
		}
	}
	if len(m.failures) > fewest {
		t.Errorf("%d ADDs failed: %q", len(m.failures), m.failures)
	}
}

// editConflist changes a network's entry, truncates its file, or removes it.
func (m *chaosTest) editConflist(t *testing.T) {
	t.Helper()
	name := m.networks()[m.random.IntN(2)]
	path := m.conflistPath(name)
	kind := m.random.IntN(10)
	if kind < 2 {
		m.waitForSources(t)
	}
	switch kind {
	case 0:
		writeAtomically(t, path, `{"cniVersion": "1.1.0", "name": "`+name+`", "plugins": [{"type": "ip-ma`)
		m.invalidConflists[name] = true
	case 1:
		m.invalidConflists[name] = false
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	default:
		m.updateSource(t, name)
	}
}

// editConfigMap changes, empties or breaks the agent files.
func (m *chaosTest) editConfigMap(t *testing.T) {
	t.Helper()
	kind := m.random.IntN(10)
	if kind < 2 {
		m.waitForSources(t)
	}
	switch kind {
	case 0:
		m.config.update(t, map[string]string{"ip-masq-agent": "nonMasqueradeCIDRs: [10.0.0.1/8]\n"})
		m.invalidConfigMap = true
	case 1:
		m.config.update(t, map[string]string{"ip-masq-agent": "enableIPv6: true\n", "ip-masq-b": "nonMasqueradeCIDRs: [\n"})
		m.invalidConfigMap = true
	case 2:
		m.config.update(t, nil)
		m.lastValid[agentFilesName], m.invalidConfigMap = object{}, false
	default:
		m.updateSource(t, agentFilesName)
	}
}

// waitInSync waits until the rules match the sources and no program commits any more.
func (m *chaosTest) waitInSync(t *testing.T) {
	t.Helper()
	m.waitForSources(t)
	m.daemon.until(t, "end of the drift", func() bool {
		stdout, _, code := m.reconciler(t, m.args("check")...)
		return code == m.wantCheckCode() && !strings.Contains(stdout, "missing") && !strings.Contains(stdout, "unexpected")
	})
	if m.allSourcesValid() {
		m.daemon.eventuallyReady(t)
	} else {
		m.daemon.eventuallyUnready(t)
	}
	const quiet = 3 * time.Second
	before := m.commits.Count()
	time.Sleep(quiet)
	if more := m.commits.Count() - before; more > 0 {
		t.Errorf("%d commits in %s after the rules were in sync: %s", more, quiet, m.commits.countByProgram(before))
	}
}

// neitherReverts alternates verbs of the plugin and syncs of the reconciler while the rules are in
// sync. It checks that neither changes a rule.
func (m *chaosTest) neitherReverts(t *testing.T) {
	t.Helper()
	before := m.commits.Count()
	for _, name := range m.networks() {
		conf := m.conf(t, name, m.lastValid[name])
		for _, verb := range []string{"ADD", "CHECK", "DEL", "ADD", "STATUS"} {
			m.invoke(t, invocation{verb: verb, conf: conf, id: "last"}).want(t, 0)
			syncs := m.daemon.metric(t, "reconciles_total")
			m.daemon.signal(t, syscall.SIGHUP)
			m.daemon.until(t, "sync", func() bool { return m.daemon.metric(t, "reconciles_total") > syncs })
		}
	}
	if _, stderr, code := m.reconciler(t, m.args("once")...); code != m.wantCheckCode() {
		t.Errorf("once: exit code %d\n%s", code, stderr)
	}
	if more := m.commits.Count() - before; more > 0 {
		t.Errorf("plugin and reconciler revert each other: %d commits: %s", more, m.commits.countByProgram(before))
	}
}

// checkCommits compares the number of commits with that of the operations: the plugin or the
// reconciler makes each change once, in a few commits.
func (m *chaosTest) checkCommits(t *testing.T, from, operations int) {
	t.Helper()
	if made := m.commits.Count() - from; made > operations*3/2 {
		t.Errorf("%d commits for %d operations: %s", made, operations, m.commits.countByProgram(from))
	}
}

// checkVerdicts sends packets to the boundaries of all prefixes of the last policy and compares
// their source addresses with the oracle.
func (m *chaosTest) checkVerdicts(t *testing.T, from *topology.Host) {
	t.Helper()
	must(t, m.Node.FlushConntrack())
	p := m.combinedPolicy()
	w := oracleNode{node: m.node, random: m.random}
	seen, masqueraded := topology.Must(from.SweepUDP(w.boundaryAddresses(p)))(t), 0
	for to, source := range seen {
		own, remote := sender{addrs: from.Addrs}.addr(to.Addr()), m.Outside
		if isPrivate(to.Addr()) {
			remote = m.LAN
		}
		want := own
		if p.masquerades(own, to.Addr(), "any") {
			want = m.NodeAddr(remote, to.Addr())
			masqueraded++
		}
		if source.Addr() != want {
			t.Errorf("to %s: came from %s, want %s", to.Addr(), source.Addr(), want)
		}
	}
	if masqueraded == 0 || masqueraded == len(seen) {
		t.Errorf("%d of %d packets were masqueraded; want some, not all", masqueraded, len(seen))
	}
}
