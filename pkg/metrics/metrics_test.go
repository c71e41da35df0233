// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func TestGolden(t *testing.T) {
	for name, report := range map[string]*reconcile.Report{"start": nil, "rich": rich()} {
		t.Run(name, func(t *testing.T) {
			m := newMonitor(metrics.Options{
				Version:       "v1.2.3",
				ThirdParty:    func(*reconcile.Report) (int, error) { return 4, nil },
				PluginVersion: func() string { return "v1.2.2" },
				Conntrack: func(context.Context) (conntrack.Stats, error) {
					return conntrack.Stats{Entries: 1000, Limit: 262144, InsertFailed: 3, Drop: 5, EarlyDrop: 7}, nil
				},
				Written: func(s policy.SourceID) (time.Time, error) {
					if s == agentFiles {
						return time.Unix(1_600_000_000, 250_000_000), nil
					}
					return time.Time{}, nil
				},
				Record: func() (store.Record, error) {
					at := policy.ChainFamily{Chain: "IP-MASQ-AGENT", Family: policy.IPv4}
					return store.Record{Deleted: []store.Deleted{{ChainFamily: at, Connections: 13}}}, nil
				},
				Log: slog.New(slog.NewTextHandler(failing{t}, nil)),
			})
			if report != nil {
				m.Report(report, time.Minute)
				m.ConnectionsReset(nil, errors.New("interrupted"))
			}
			scrape(t, m)
			var lines []string
			for line := range strings.Lines(get(m.Metrics(), "/metrics").Body.String()) {
				lines = append(lines, strings.Replace(line, runtime.Version(), "GO", 1))
			}
			got, file := strings.Join(lines, ""), "testdata/"+name+".prom"
			golden.Check(t, file, got)
		})
	}
}

func TestAVanishedSourceDisappears(t *testing.T) {
	m := newMonitor(metrics.Options{})
	a, b := source(network("a"), "A"), source(network("b"), "B")
	report := func(all ...policy.Source) {
		m.Report(&reconcile.Report{State: store.State{Sources: all}, Rules: inSync(iptables, all...)}, time.Minute)
	}
	report(a, b)
	expect(t, m, map[string]string{`source_valid{source="network/a"}`: "1", `source_valid{source="network/b"}`: "1", `policy_conflict{chain="B"}`: "0"})
	report(a)
	expect(t, m, map[string]string{
		`source_valid{source="network/a"}`: "1", `source_valid{source="network/b"}`: "", `source_hash{source="network/b"}`: "",
		`policy_conflict{chain="B"}`: "", `prefixes{action="exempt",chain="B",family="ipv4"}`: "",
		// 169.254.0.0/16, multicast, broadcast and the three defaults: 8 to 13; MASQUERADE: 14.
		`connections_total{action="exempt",chain="B",family="ipv4"}`:     "63",
		`connections_total{action="masquerade",chain="B",family="ipv4"}`: "14",
	})
}

// TestWaitingIsNoSync: a loop that must not use its dataDir reports that each second, and makes no sync.
func TestWaitingIsNoSync(t *testing.T) {
	m := newMonitor(metrics.Options{})
	for range 3 {
		m.Report(&reconcile.Report{
			Result: reconcile.Failed, Waiting: true, Sources: missing(),
			Problems: []reconcile.Problem{{Reason: reconcile.ReasonState, Err: errors.New("another dataDir")}},
		}, time.Minute)
	}
	expect(t, m, map[string]string{
		"ready": "0", `reconciles_total{result="failed"}`: "0", "reconcile_duration_seconds_count": "0",
	})
}

func TestASyncThatCouldNotReadLeavesWhatWasKnown(t *testing.T) {
	m := newMonitor(metrics.Options{})
	m.Report(rich(), time.Minute)
	m.Report(&reconcile.Report{
		Result: reconcile.Failed, Sources: missing(),
		Problems: []reconcile.Problem{{Reason: reconcile.ReasonState, Err: errors.New("locked")}},
	}, time.Minute)
	expect(t, m, map[string]string{
		"ready": "0", `source_valid{source="network/bridge"}`: "1", `policy_conflict{chain="SECOND"}`: "1",
		`reconciles_total{result="failed"}`: "1", `reconciles_total{result="repaired"}`: "1",
		"last_reconcile_success_timestamp_seconds": "1.700000000003e+09", "conflist_present": "0",
	})
}

func TestStandbyIsNoSync(t *testing.T) {
	m := newMonitor(metrics.Options{})
	m.Report(rich(), time.Minute)
	before := scrape(t, m)
	m.Report(&reconcile.Report{Result: reconcile.Unchanged, Problems: []reconcile.Problem{
		{Reason: reconcile.ReasonStandby, Err: errors.New("standing by")},
	}}, time.Minute)
	after := scrape(t, m)
	for sample, value := range before {
		counter := strings.Contains(sample, "_total") || strings.Contains(sample, "reconcile") || strings.Contains(sample, "build_info")
		if strings.HasPrefix(sample, "ip_masq_") && counter && after[sample] != value {
			t.Errorf("%s is %q, was %q", sample, after[sample], value)
		}
	}
	expect(t, m, map[string]string{"ready": "0", `source_valid{source="network/bridge"}`: "", "conflist_present": "", `policy_conflict{chain="SECOND"}`: ""})
}

func TestConflistPresent(t *testing.T) {
	with := config.Conflist{Network: "with", Entries: []config.ConflistEntry{{Err: errors.New("refused, but there")}}}
	without := config.Conflist{Network: "without"}
	multus := func(doc string) config.Conflist {
		return config.Conflist{Network: "multus", Types: []string{"multus-shim"}, Doc: []byte(doc)}
	}
	lists := func(l ...config.Conflist) *reconcile.Sources {
		return &reconcile.Sources{ConfDir: config.ConfDir{Conflists: l}}
	}
	for name, test := range map[string]struct {
		sources *reconcile.Sources
		want    string
	}{
		"ours first":              {lists(with, without), "1"},
		"ours second":             {lists(without, with), "0"},
		"none":                    {lists(), "0"},
		"behind the loopback":     {lists(config.Conflist{Network: "lo", Types: []string{"loopback"}}, with), "1"},
		"behind a broken file":    {lists(config.Conflist{Err: errors.New("no JSON")}, with), "0"},
		"behind Multus":           {lists(multus(`{"delegates": [{"name": "with"}]}`), with), "1"},
		"behind Multus, third":    {lists(multus(`{"delegates": [{"name": "with"}]}`), without, with), "1"},
		"Multus uses another one": {lists(multus(`{"delegates": [{"name": "without"}]}`), with, without), "0"},
		"behind Multus, unknown":  {lists(multus(`{"clusterNetwork": "in-the-cluster"}`), with), ""},
		"no directory":            {missing(), "0"},
		"unreadable":              {&reconcile.Sources{ConfDirErr: os.ErrPermission}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMonitor(metrics.Options{})
			m.Report(&reconcile.Report{Sources: test.sources}, time.Minute)
			expect(t, m, map[string]string{"conflist_present": test.want})
		})
	}
}

func TestHashOfPolicies(t *testing.T) {
	hash := func(c policy.Source) string {
		m := newMonitor(metrics.Options{})
		m.Report(&reconcile.Report{State: store.State{Sources: []policy.Source{c}}, Rules: &enforce.State{}}, time.Minute)
		return scrape(t, m)[`ip_masq_source_hash{source="network/a"}`]
	}
	left, empty := source(network("a"), "A"), source(network("a"), "A", []string{}...)
	empty.Policy.NonMasqueradeCIDRs = prefixes()
	again := left
	again.Order = 7 // no part of what it states
	if a, b, c := hash(left), hash(empty), hash(again); a == "" || a == b || a != c {
		t.Errorf("left out %q, empty %q, left out again %q", a, b, c)
	}
}

func TestNamesAreBounded(t *testing.T) {
	m := newMonitor(metrics.Options{})
	var all []policy.Source
	r := &reconcile.Report{}
	for i := range 300 {
		name := fmt.Sprintf("%s\xff\n%04d", strings.Repeat("n", 100), i)
		c := source(network(name), fmt.Sprintf("CHAIN-%04d", i))
		c.Policy.Guard, c.Policy.PodCIDRs = policy.GuardDrop, prefixes("10.244.0.0/16")
		all = append(all, c)
	}
	r.State.Sources, r.Rules = all, inSync(iptables, all...)
	r.Rules.Guard = guards(r.Rules.Policies(), 2)
	m.Report(r, time.Minute)
	m.Report(r, time.Minute)
	count := map[string]int{}
	for sample := range scrape(t, m) {
		name, labels, _ := strings.Cut(sample, "{")
		count[name]++
		for _, l := range strings.Split(labels, `",`) {
			if _, value, _ := strings.Cut(l, `="`); len(value) > 2*63 { // escaped
				t.Errorf("%s has a long label", sample)
			}
		}
	}
	for name, want := range map[string]int{
		"source_valid": 200, "source_hash": 200, "policy_conflict": 200, "prefixes": 2 * 200, "connections_total": 2 * 200,
		"guard_active": 200, "guard_packets_total": 200, "connections_reset_total": 200,
	} {
		assert.Equal(t, "series of "+name, count["ip_masq_"+name], want)
	}
}

func TestAScrapeReadsTheRulesAnew(t *testing.T) {
	c := source(network("a"), "A", "10.0.0.0/8")
	c.Policy.Guard, c.Policy.PodCIDRs = policy.GuardCount, prefixes("10.244.0.0/16")
	v := inSync(nftables, c)
	v.Guard = guards(v.Policies(), 5)
	m := newMonitor(metrics.Options{State: func(context.Context) *enforce.State { return v }})
	m.Report(&reconcile.Report{Rules: inSync(nftables, c)}, time.Minute)
	v.Chains[0].Observed.Chains[0].Rules[1].Connections = 102
	expect(t, m, map[string]string{
		`connections_total{action="exempt",chain="A",family="ipv4"}`: "1", `connections_total{action="masquerade",chain="A",family="ipv4"}`: "102",
		`guard_packets_total{action="count",chain="A",family="ipv4"}`: "5",
	})
}

func TestAReadingOlderThanAReportDoesNotCountTwice(t *testing.T) {
	c := source(network("a"), "A", "10.0.0.0/8")
	var m *metrics.Monitor
	m = newMonitor(metrics.Options{State: func(context.Context) *enforce.State {
		older, newer := inSync(nftables, c), inSync(nftables, c)
		newer.Chains[0].Observed.Chains[0].Rules[0].Connections = 50
		m.Report(&reconcile.Report{Rules: newer}, time.Minute) // while the scrape has not got its answer
		return older
	}})
	expect(t, m, map[string]string{`connections_total{action="exempt",chain="A",family="ipv4"}`: "50"})
	expect(t, m, map[string]string{`connections_total{action="exempt",chain="A",family="ipv4"}`: "50"})
}

func TestAScrapeDoesNotWaitForever(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		release := make(chan struct{})
		m := newMonitor(metrics.Options{State: func(ctx context.Context) *enforce.State {
			if _, bounded := ctx.Deadline(); !bounded {
				t.Error("a reading may take forever")
			}
			asked++
			<-release // whatever the context says
			return nil
		}})
		m.Report(rich(), time.Minute)
		var scrapes sync.WaitGroup
		began := time.Now()
		for range 20 {
			scrapes.Go(func() {
				if w := get(m.Metrics(), "/metrics"); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "ip_masq_ready 0") {
					t.Errorf("%d: %s", w.Code, w.Body)
				}
			})
		}
		synctest.Wait()
		assert.Equal(t, "health waits for a scrape: code", get(m.Health(), "/livez").Code, http.StatusOK)
		scrapes.Wait()
		if took := time.Since(began); took != 2*time.Second || asked != 1 {
			t.Errorf("scrapes took %s and asked %d times", took, asked)
		}
		close(release)
		synctest.Wait()
		get(m.Metrics(), "/metrics")
		assert.Equal(t, "asked after the answer came", asked, 2)
	})
}

// gone is the response to a client that is gone.
type gone struct {
	*httptest.ResponseRecorder
	port int
}

func (g *gone) Write([]byte) (int, error) {
	g.port++
	return 0, fmt.Errorf("write tcp 127.0.0.1:19821->127.0.0.1:%d: write: broken pipe", g.port)
}

// TestAClientThatLeavesIsNotLogged: clients can be many, and each has its port.
func TestAClientThatLeavesIsNotLogged(t *testing.T) {
	var log bytes.Buffer
	m := newMonitor(metrics.Options{
		Log:       slog.New(slog.NewTextHandler(&log, nil)),
		Conntrack: func(context.Context) (conntrack.Stats, error) { return conntrack.Stats{}, nil },
	})
	m.Metrics().ServeHTTP(&gone{ResponseRecorder: httptest.NewRecorder()}, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	if log.Len() > 0 {
		t.Errorf("logged:\n%s", &log)
	}
}

func TestErrorsOfAScrapeAreLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	fail := true
	m := newMonitor(metrics.Options{
		Log: slog.New(slog.NewTextHandler(&log, nil)),
		ThirdParty: func(*reconcile.Report) (int, error) {
			if fail {
				return 9, errors.New("no permission")
			}
			return 2, nil
		},
		Conntrack: func(context.Context) (conntrack.Stats, error) {
			return conntrack.Stats{Entries: 1}, errors.New("no such file")
		},
		Written: func(policy.SourceID) (time.Time, error) { return time.Time{}, errors.New("i/o error") },
	})
	c := source(network("a"), "A")
	m.Report(&reconcile.Report{State: store.State{Sources: []policy.Source{c}}, Rules: inSync(iptables, c)}, time.Minute)
	expect(t, m, map[string]string{"foreign_rules": "", "conntrack_entries": "", `source_last_written_timestamp_seconds{source="network/a"}`: ""})
	expect(t, m, map[string]string{"foreign_rules": ""})
	fail = false
	expect(t, m, map[string]string{"foreign_rules": "2"})
	for _, want := range []string{"no permission", "no such file", `source="network \"a\"" err="i/o error"`} {
		if strings.Count(log.String(), want) != 1 {
			t.Errorf("the log does not have %s once:\n%s", want, &log)
		}
	}
	if n := strings.Count(log.String(), "\n"); n != 3 {
		t.Errorf("the log has %d lines:\n%s", n, &log)
	}
}

func TestMonitorIsSafeForConcurrentUse(t *testing.T) {
	m := newMonitor(metrics.Options{
		State:   func(context.Context) *enforce.State { return rich().Rules },
		Written: func(policy.SourceID) (time.Time, error) { return time.Unix(1, 0), nil },
	})
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 50 {
				m.Report(rich(), time.Minute)
				get(m.Metrics(), "/metrics")
				get(m.Health(), "/readyz")
			}
		})
	}
	all.Wait()
	expect(t, m, map[string]string{`reconciles_total{result="repaired"}`: "200", `connections_total{action="exempt",chain="SECOND",family="ipv4"}`: "10"})
}
