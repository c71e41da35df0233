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

// TestPluginAndReconcilerAtOnce has both work on one node while conflists, the
// ConfigMap and the rules are changed at random. In the end all is as the last
// sound sources say, nobody has anything left to do, and no packet to what was
// exempt all the time was ever masqueraded.
func TestPluginAndReconcilerAtOnce(t *testing.T) {
	t.Parallel()
	const budget = 10 * time.Second // of each form
	for _, f := range backends()[:2] {
		t.Run(f.name, func(t *testing.T) {
			start := time.Now()
			for i := uint64(0); i == 0 || time.Since(start) < budget && !t.Failed(); i++ {
				t.Run(fmt.Sprintf("seed %d", *seed+i), func(t *testing.T) { runRandomOperations(t, f, *seed+i) })
			}
		})
	}
}

func runRandomOperations(t *testing.T, f backend, seed uint64) {
	t.Helper()
	const operations = 200
	m := newChaosTest(t, newNode(t, f), seed)
	lone := topology.Must(m.AddPod("lone", transit4, transit6))(t)
	load := topology.Must(lone.StartLoad(slices.Concat(addrPorts(netip.MustParseAddr("10.9.0.0"), 60), addrPorts(netip.MustParseAddr("fd00:9::"), 60))))(t)
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
		if own := netip.AddrPortFrom(sender{addrs: lone.Addrs}.addr(flow.To.Addr()), flow.From); flow.Source != own {
			if wrong++; wrong <= 5 {
				t.Errorf("to %s, which was exempt all the time: came from %s, was sent from %s", flow.To.Addr(), flow.Source, own)
			}
		}
	}
	if wrong > 0 || len(report.Flows) < 1000 {
		t.Errorf("%d of %d connections were judged wrong; fewer than 1000 say little", wrong, len(report.Flows))
	}
	m.checkVerdicts(t, lone)
	m.neitherReverts(t)
	t.Logf("-seed %d: %v, of which %d failed; %d connections; %s", seed, m.counts, len(m.failures), len(report.Flows), m.commits.countByProgram(from))
}

// TestConflistAndAddAtOnce writes a conflist and runs ADD with it right after, as
// a runtime may. The reconciler hears of both. Whichever comes first, the other
// finds all right: once ADD has returned, nobody writes a rule.
func TestConflistAndAddAtOnce(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[:2] {
		t.Run(f.name, func(t *testing.T) {
			t.Logf("-seed %d", *seed)
			m := newChaosTest(t, newNode(t, f), *seed)
			m.waitForSources(t)
			added := 0
			for i := range 30 {
				name := m.networks()[i%2]
				m.updateSource(t, name)
				time.Sleep(time.Duration(m.random.IntN(12)) * time.Millisecond)
				conf := m.conf(t, name, m.lastValid[name])
				began := m.generation(t)
				m.invoke(t, invocation{verb: "ADD", conf: conf, id: fmt.Sprint("added", i)}).want(t, 0)
				// The kernel's own number: the ear may hear of a commit later.
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
				t.Error("the reconciler was always first, which says nothing")
			}
			if drift := m.daemon.metric(t, "drift_repairs_total"); drift != 0 {
				t.Errorf("what the plugin did was taken for drift %v times", drift)
			}
		})
	}
}

// operation makes one at random. Those of the plugin go on while others are
// made.
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

// plugin starts a verb of the plugin, with the entry that a network has now.
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
		_ = c.Wait() // the exit code tells
		m.mu.Lock()
		defer m.mu.Unlock()
		if c.ProcessState.ExitCode() != 0 {
			m.failures = append(m.failures, verb+": "+out.String()+errs.String())
		}
	})
}

// await waits for the plugin's runs. Only an ADD may have failed, and only when
// its rules were taken away before it had seen that they stand.
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

// editConflist changes what a network states, spoils its file, or removes it.
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

// editConfigMap has the agents' files state something else, nothing, or nonsense.
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

// settle waits until nobody does anything any more, and everybody is content.
func (m *chaosTest) waitInSync(t *testing.T) {
	t.Helper()
	m.waitForSources(t)
	m.daemon.within(t, 3*time.Second, "end of the drift", func() bool {
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
		t.Errorf("%d commits in %s after all was right: %s", more, quiet, m.commits.countByProgram(before))
	}
}

// neitherUndoes has the plugin and the reconciler take turns where all is right:
// neither may find anything to do.
func (m *chaosTest) neitherReverts(t *testing.T) {
	t.Helper()
	before := m.commits.Count()
	for _, name := range m.networks() {
		conf := m.conf(t, name, m.lastValid[name])
		for _, verb := range []string{"ADD", "CHECK", "DEL", "ADD", "STATUS"} {
			m.invoke(t, invocation{verb: verb, conf: conf, id: "last"}).want(t, 0)
			passes := m.daemon.metric(t, "reconciles_total")
			m.daemon.signal(t, syscall.SIGHUP)
			m.daemon.until(t, "pass", func() bool { return m.daemon.metric(t, "reconciles_total") > passes })
		}
	}
	if _, stderr, code := m.reconciler(t, m.args("once")...); code != m.wantCheckCode() {
		t.Errorf("once: exit code %d\n%s", code, stderr)
	}
	if more := m.commits.Count() - before; more > 0 {
		t.Errorf("they undo one another: %d commits: %s", more, m.commits.countByProgram(before))
	}
}

// judgeCommits holds their number against that of the operations: a change is
// made in a few commits, by the plugin or the reconciler, and not again.
func (m *chaosTest) checkCommits(t *testing.T, from, operations int) {
	t.Helper()
	if made := m.commits.Count() - from; made > operations*3/2 {
		t.Errorf("%d commits for %d operations: %s", made, operations, m.commits.countByProgram(from))
	}
}

// judgeVerdicts sends packets to the borders of all prefixes that were stated
// last, and holds them against the oracle.
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
		t.Errorf("%d of %d were masqueraded, which says little", masqueraded, len(seen))
	}
}
