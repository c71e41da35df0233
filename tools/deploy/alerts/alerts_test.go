// SPDX-License-Identifier: Apache-2.0

package alerts

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/util/annotations"
	"sigs.k8s.io/yaml"
)

const (
	root   = "../../../"
	faults = "pkg/metrics/testdata/faults/" // of the collector's tests
	nodes  = "deploy/testdata/metrics/"     // of nodes with a fault, from the tests of package e2e
	scrape = 30 * time.Second               // how far scrapes are apart, as the PodMonitor has it
	watch  = 4 * time.Hour
	began  = time.Hour // when something happens
)

// values returns the value of a series at a time, if it has one; was is the unchanged value.
type values func(at time.Duration, was float64) (value float64, there bool)

func is(v float64) values { return func(time.Duration, float64) (float64, bool) { return v, true } }

func absent(time.Duration, float64) (float64, bool) { return 0, false }

// during returns another value for a time.
func during(length time.Duration, v float64) values {
	return func(at time.Duration, was float64) (float64, bool) {
		if at >= began && at < began+length {
			return v, true
		}
		return was, true
	}
}

// rising increases the value this number of times.
func rising(by float64, interval time.Duration, times int) values {
	return func(at time.Duration, was float64) (float64, bool) {
		if at < began {
			return was, true
		}
		return was + by*float64(min(times, int((at-began)/interval)+1)), true
	}
}

// cluster has the series that Prometheus has scraped.
type cluster struct{ series []series }

type series struct {
	labels labels.Labels
	was    float64
	values values
}

// node adds a node with the text of /metrics in a file.
func (c *cluster) node(t *testing.T, node, file string) {
	t.Helper()
	text := read(t, file)
	if filepath.Dir(file)+"/" == faults && file != faults+"sound.prom" {
		text = different(read(t, faults+"sound.prom"), text)
	}
	p := must(textparse.New([]byte(text), "text/plain", nil, textparse.ParserOptions{}))(t)
	for {
		kind, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if kind == textparse.EntrySeries {
			var l labels.Labels
			p.Labels(&l)
			_, _, v := p.Series()
			c.add(l, node, v)
		}
	}
	c.add(labels.FromStrings("__name__", "up"), node, 1)
}

// must returns the value of a function, and fails the test on its error.
func must[V any](value V, err error) func(*testing.T) V {
	return func(t *testing.T) V {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	return string(must(os.ReadFile(filepath.Join(root, file)))(t))
}

// different returns a text of /metrics with other samples, which have no value if they are missing.
func different(text, samples string) string {
	for sample := range strings.Lines(samples) {
		name, _, hasValue := strings.Cut(strings.TrimSpace(sample), " ")
		old := regexp.MustCompile("(?m)^" + regexp.QuoteMeta(name) + " .*\n")
		if text = old.ReplaceAllLiteralString(text, ""); hasValue {
			text += sample
		}
	}
	return text
}

func (c *cluster) add(l labels.Labels, node string, v float64) {
	b := labels.NewBuilder(l)
	b.Set("node", node).Set("job", "kube-system/ip-masq")
	c.series = append(c.series, series{b.Labels(), v, is(v)})
}

// becomes replaces all series by those of another cluster when something happens.
func (c *cluster) becomes(broken cluster) {
	later := map[uint64]float64{}
	for _, s := range broken.series {
		later[s.labels.Hash()] = s.was
	}
	for i, s := range c.series {
		v, remains := later[s.labels.Hash()]
		delete(later, s.labels.Hash())
		c.series[i].values = func(at time.Duration, was float64) (float64, bool) {
			switch {
			case at < began:
				return was, true
			case at == began && !remains:
				return math.Float64frombits(value.StaleNaN), true // what Prometheus appends
			}
			return v, remains
		}
	}
	for _, s := range broken.series {
		if _, added := later[s.labels.Hash()]; added {
			s.values = func(at time.Duration, was float64) (float64, bool) { return was, at >= began }
			c.series = append(c.series, s)
		}
	}
}

// change replaces the values of a node's series that match the selector.
func (c *cluster) change(t *testing.T, node, selector string, v values) {
	t.Helper()
	matchers := must(parser.NewParser(parser.Options{}).ParseMetricSelector(selector))(t)
	changed := 0
	for i, s := range c.series {
		if s.labels.Get("node") == node && matched(s.labels, matchers) {
			c.series[i].values = v
			changed++
		}
	}
	if changed == 0 {
		t.Fatalf("there is no series %s of node %s", selector, node)
	}
}

func matched(l labels.Labels, matchers []*labels.Matcher) bool {
	return !slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(l.Get(m.Name)) })
}

// queryable returns the series for the PromQL engine.
func (c *cluster) queryable() storage.Queryable {
	return &storage.MockQueryable{MockQuerier: &storage.MockQuerier{
		SelectMockFunction: func(_ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
			found := &found{at: -1}
			for _, one := range c.series {
				if !matched(one.labels, matchers) {
					continue
				}
				s := promql.Series{Metric: one.labels}
				for at := time.Duration(0); at <= watch; at += scrape {
					if v, there := one.values(at, one.was); there {
						s.Floats = append(s.Floats, promql.FPoint{T: at.Milliseconds(), F: v})
					}
				}
				found.series = append(found.series, promql.NewStorageSeries(s))
			}
			return found
		},
	}}
}

type found struct {
	series []storage.Series
	at     int
}

func (f *found) Next() bool                      { f.at++; return f.at < len(f.series) }
func (f *found) At() storage.Series              { return f.series[f.at] }
func (*found) Err() error                        { return nil }
func (*found) Warnings() annotations.Annotations { return nil }

const step = time.Minute // between two evaluations of a rule

// evaluate returns the result of an expression at each step.
func (c *cluster) evaluate(t *testing.T, engine *promql.Engine, expression string) promql.Matrix {
	t.Helper()
	q := must(engine.NewRangeQuery(t.Context(), c.queryable(), nil, expression, time.Unix(0, 0), time.Unix(0, 0).Add(watch), step))(t)
	t.Cleanup(q.Close)
	result := q.Exec(t.Context())
	matrix, err := result.Matrix()
	if err != nil || len(result.Warnings) > 0 {
		t.Fatalf("%s: %v %v", expression, err, result.Warnings)
	}
	return matrix
}

// fire returns the alerts that fire, with their nodes, and when they first do. It adds the labels of each to seen.
func (c *cluster) fire(t *testing.T, engine *promql.Engine, rules []monitoring.Rule, seen map[string]map[string]string) map[string]time.Duration {
	t.Helper()
	fired := map[string]time.Duration{}
	for _, rule := range rules {
		if seen[rule.Alert] == nil {
			seen[rule.Alert] = map[string]string{}
		}
		wait := must(model.ParseDuration(string(*rule.For)))(t)
		for _, s := range c.evaluate(t, engine, rule.Expr.String()) {
			var since, last int64 = -1, -1
			for _, p := range s.Floats {
				if since < 0 || p.T != last+step.Milliseconds() {
					since = p.T
				}
				last = p.T
				if time.Duration(p.T-since)*time.Millisecond >= time.Duration(wait) {
					maps.Copy(seen[rule.Alert], s.Metric.Map())
					// Two series of one alert are two notifications.
					name := rule.Alert + " " + s.Metric.Get("node")
					for fired[name] != 0 {
						name += " again"
					}
					fired[name] = time.Duration(p.T) * time.Millisecond
					break
				}
			}
		}
	}
	return fired
}

// render renders the texts of an alert as Prometheus does, with the labels of its series.
func render(t *testing.T, rule monitoring.Rule, labels map[string]string) {
	t.Helper()
	if rule.Labels["severity"] == "" || rule.Annotations["summary"] == "" || rule.Annotations["description"] == "" {
		t.Errorf("%s lacks a severity, a summary or a description", rule.Alert)
	}
	for key, text := range rule.Annotations {
		parsed, err := template.New("text").Option("missingkey=error").Parse("{{$labels := .Labels}}{{$value := .Value}}" + text)
		if err == nil {
			err = parsed.Execute(io.Discard, map[string]any{"Labels": labels, "Value": 1.0})
		}
		if err != nil {
			t.Errorf("%s: %s: %v", rule.Alert, key, err)
		}
	}
}

func newEngine() *promql.Engine {
	return promql.NewEngine(promql.EngineOpts{MaxSamples: 1 << 22, Timeout: time.Minute, LookbackDelta: 5 * time.Minute})
}

func alerts(t *testing.T) []monitoring.Rule {
	t.Helper()
	var r monitoring.PrometheusRule
	if err := yaml.UnmarshalStrict([]byte(read(t, "deploy/kustomize/components/monitoring/rules.yaml")), &r); err != nil {
		t.Fatal(err)
	}
	return r.Spec.Groups[0].Rules
}

// TestAlerts checks that each alert fires for its fault, on the node with the fault, and for no
// other.
func TestAlerts(t *testing.T) {
	rules := alerts(t)
	engine := newEngine()
	tested, seen := map[string]bool{}, map[string]map[string]string{}
	for _, tt := range []struct {
		name, fault, want string
		change            map[string]values
	}{
		{"sound", "sound", "", nil},
		{"rules that are not right", "rules", "IPMasqRulesNotEnsured", nil},
		{"a full disk", "state", "IPMasqStateUnusable", nil},
		{"a full disk, and another ConfigMap since", "state", "IPMasqStateUnusable", map[string]values{`ip_masq_source_hash{source="agent-files"}`: is(7)}},
		{"an unreadable disk, and a source that was invalid before", "state", "IPMasqStateUnusable", map[string]values{`ip_masq_source_valid{source="agent-files"}`: is(0)}},
		{"a bad ConfigMap", "source", "IPMasqSourceInvalid", nil},
		{"a misspelled key in the ConfigMap", "unknown-key", "IPMasqUnknownKey", nil},
		{"a bad reconciler.toml", "settings", "IPMasqSourceInvalid", nil},
		{"a conflict with the agent files", "conflict-superseded", "IPMasqPolicyConflict", nil},
		{"a conflict of networks", "conflict-refused", "IPMasqPolicyConflict", nil},
		{"chains of another dataDir", "conflict-datadir", "IPMasqPolicyConflict", nil},
		{"an entry with which every ADD fails", "conflist", "IPMasqConflistWrong", nil},
		{"no entry", "conflist-absent", "IPMasqConflistWrong", nil},
		{"an entry that is removed again and again", "conflist-flapping", "IPMasqConflistFlapping", nil},
		{"an entry that is lost without manage", "sound", "IPMasqEntryLost", map[string]values{
			"ip_masq_conflist_present": during(watch, 0), "ip_masq_conflist_flapping": absent}},
		{"no plugin", "plugin", "IPMasqPluginMissing", nil},
		{"no plugin, and so no entry", "plugin-absent", "IPMasqPluginMissing", nil},
		{"no iptables", "backend", "IPMasqBackendUnusable", nil},
		{"a second reconciler", "standby", "IPMasqStandby", nil},
		{"no address for pods to leave with", "output-address", "IPMasqNoOutputAddress", nil},
		{"flapping", "flapping", "IPMasqRulesUndone", nil},
		{"flapping, undone again already", "flapping", "IPMasqRulesUndone", map[string]values{`ip_masq_not_ready{reason="rules"}`: is(1)}},
		{"flapping, counted", "flapping", "IPMasqRulesUndone", map[string]values{`ip_masq_drift_repairs_total{kind="rule"}`: rising(1, time.Minute, 1000)}},
		{"undone once a minute", "sound", "IPMasqRulesUndone", map[string]values{`ip_masq_drift_repairs_total{kind="rule"}`: rising(3, time.Minute, 1000)}},
		{"undone every four minutes", "sound", "IPMasqRulesUndone", map[string]values{`ip_masq_drift_repairs_total{kind="chain"}`: rising(1, 4*time.Minute, 1000)}},
		{"a firewall that reloads once", "sound", "", map[string]values{`ip_masq_drift_repairs_total{kind="rule"}`: rising(70, time.Minute, 1)}},
		{"and twice", "sound", "", map[string]values{`ip_masq_drift_repairs_total{kind="rule"}`: rising(70, 10*time.Minute, 2)}},
		{"a person who tries things", "sound", "", map[string]values{`ip_masq_drift_repairs_total{kind="rule"}`: rising(1, time.Minute, 12)}},
		{"third-party rules", "sound", "IPMasqForeignRules", map[string]values{"ip_masq_foreign_rules": is(2)}},
		{"another plugin's version", "sound", "IPMasqVersionSkew", map[string]values{`ip_masq_build_info`: absent}},
		{"another ConfigMap in force", "sound", "IPMasqNodesDiffer", map[string]values{`ip_masq_source_hash{source="agent-files"}`: is(7)}},
		{"another policy of a network in force", "sound", "IPMasqNodesDiffer", map[string]values{`ip_masq_source_hash{source!="agent-files"}`: is(7)}},
		{"an entry that somebody has changed", "sound", "IPMasqEntryDiffers", map[string]values{`ip_masq_conflist_entry_differs`: is(1)}},
		{"another ConfigMap for a moment", "sound", "", map[string]values{`ip_masq_source_hash{source="agent-files"}`: during(20*time.Minute, 7)}},
		{"many packets that the guard drops", "sound", "IPMasqGuardPackets", map[string]values{"ip_masq_guard_packets_total": rising(900, time.Minute, 1000)}},
		{"late packets that the guard drops", "sound", "", map[string]values{"ip_masq_guard_packets_total": rising(300, time.Minute, 1000)}},
		{"many packets for a moment", "sound", "", map[string]values{"ip_masq_guard_packets_total": rising(900, time.Minute, 10)}},
		{"a guard without a range", "sound", "IPMasqGuardInactive", map[string]values{"ip_masq_guard_active": is(0)}},
		{"a conntrack table that is nearly full", "sound", "IPMasqConntrackExhausted", map[string]values{"ip_masq_conntrack_entries": is(250_000)}},
		{"a conntrack table without a limit", "sound", "", map[string]values{"ip_masq_conntrack_limit": is(0)}},
		{"connections that are dropped early", "sound", "IPMasqConntrackExhausted", map[string]values{"ip_masq_conntrack_early_drop_total": rising(1, time.Minute, 1000)}},
		{"no free source ports", "sound", "IPMasqConntrackExhausted", map[string]values{"ip_masq_conntrack_drop_total": rising(90, time.Minute, 1000)}},
		{"lookups of names that collide", "sound", "", map[string]values{"ip_masq_conntrack_drop_total": rising(30, time.Minute, 1000)}},
		{"does not answer", "sound", "IPMasqDown", map[string]values{`{__name__=~"ip_masq_.*"}`: absent, "up": is(0)}},
		{"not ready for five minutes", "sound", "", map[string]values{
			"ip_masq_ready": during(5*time.Minute, 0), `ip_masq_not_ready{reason="rules"}`: during(5*time.Minute, 1)}},
		{"undone for a moment", "sound", "", map[string]values{
			"ip_masq_ready": during(3*time.Minute, 0), `ip_masq_not_ready{reason="flapping"}`: during(3*time.Minute, 1),
			`ip_masq_drift_repairs_total{kind="rule"}`: rising(30, time.Minute, 3)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var c cluster
			c.node(t, "other", faults+"sound.prom")
			c.node(t, "one", faults+tt.fault+".prom")
			for selector, v := range tt.change {
				c.change(t, "one", selector, v)
			}
			want := ""
			if tt.want != "" {
				want = tt.want + " one"
				tested[tt.want] = true
			}
			if tt.want == "IPMasqNodesDiffer" {
				want = tt.want + " " // it is about no node
			}
			if got := strings.Join(slices.Sorted(maps.Keys(c.fire(t, engine, rules, seen))), ", "); got != want {
				t.Errorf("%q fired, want %q", got, want)
			}
		})
	}
	t.Run("a conflict in two chains", func(t *testing.T) {
		var c cluster
		c.node(t, "one", faults+"conflict-superseded.prom")
		c.add(labels.FromStrings("__name__", "ip_masq_policy_conflict", "chain", "OTHER"), "one", 1)
		if got := c.fire(t, engine, rules, seen); fmt.Sprint(got) != "map[IPMasqPolicyConflict one:10m0s]" {
			t.Errorf("%v fired", got)
		}
	})
	t.Run("none answers", func(t *testing.T) {
		var c cluster
		if got := c.fire(t, engine, rules, seen); fmt.Sprint(got) != "map[IPMasqDown :10m0s]" {
			t.Errorf("%v fired", got)
		}
	})
	for _, rule := range rules {
		if !tested[rule.Alert] {
			t.Errorf("no fault here makes %s fire", rule.Alert)
		}
		render(t, rule, seen[rule.Alert])
	}
}

// brokenNode says which reasons the dashboard has, and which alert fires how long after the node broke.
type brokenNode struct{ reasons, alerts string }

// brokenNodes returns the nodes with one fault, by the names of their files.
func brokenNodes() map[string]brokenNode {
	const state = "IPMasqStateUnusable 10m0s"
	return map[string]brokenNode{
		"healthy":                {"", ""},
		"rules-flushed":          {"flapping", "IPMasqRulesUndone 5m0s"},
		"third-party-masquerade": {"", "IPMasqForeignRules 5m0s"},
		"bad-configmap":          {"source", "IPMasqSourceInvalid 10m0s"},
		"unknown-configmap-key":  {"", "IPMasqUnknownKey 10m0s"},
		"conflict":               {"conflict", "IPMasqPolicyConflict 10m0s"},
		"full-disk":              {"state", state},
		"read-only-data-dir":     {"state", state},
		"damaged-document":       {"state", state},
		"backend-typo":           {"source", "IPMasqSourceInvalid 10m0s"},
		"conflicting-flag":       {"source", "IPMasqSourceInvalid 10m0s"},
		"iptables-missing":       {"backend", "IPMasqBackendUnusable 10m0s"},
		"forwarding-off":         {"", ""},
		"main-plugin-ipmasq":     {"", "IPMasqForeignRules 5m0s"},
		"entry-lost":             {"", "IPMasqEntryLost 10m0s"},
		"entry-first":            {"conflist", "IPMasqConflistWrong 10m0s"},
		"plugin-missing":         {"plugin", "IPMasqPluginMissing 5m0s"},
		"two-reconcilers":        {"standby", "IPMasqStandby 30m0s"},
		"stopped-reconciler":     {"no answer", "IPMasqDown 10m0s"},
		"hanging-reconciler":     {"no answer", "IPMasqDown 10m0s"},
		"foreign-data-dir-owner": {"state", state},
		"newer-schema":           {"state", state},
		"third-party-chain":      {"rules", "IPMasqRulesNotEnsured 10m0s"},
		"bad-ports":              {"source", "IPMasqSourceInvalid 10m0s"},
		"metrics-port-busy":      {"no answer", "IPMasqDown 10m0s"},
		"other-data-dir":         {"conflist", "IPMasqConflistWrong 10m0s, IPMasqEntryDiffers 10m0s"},
	}
}

// TestBrokenNodes checks, with the metrics of a healthy node and from then on those of a node with each
// fault, which alerts fire and after how long, and which reasons the dashboard's table of nodes that
// are not ready has.
func TestBrokenNodes(t *testing.T) {
	cases := brokenNodes()
	files := must(filepath.Glob(filepath.Join(root, nodes, "*.prom")))(t)
	for _, file := range files {
		if _, tested := cases[strings.TrimSuffix(filepath.Base(file), ".prom")]; !tested {
			t.Errorf("no case is about %s", file)
		}
	}
	rules, engine, table := alerts(t), newEngine(), panels(t)["Nodes that are not ready"][0]
	for name, tt := range cases {
		t.Run(name, func(t *testing.T) {
			var c, broken cluster // which is healthy, and from then on has the fault
			c.node(t, "one", nodes+"healthy.prom")
			if strings.HasPrefix(tt.alerts, "IPMasqDown") { // nothing answers at the port
				broken.add(labels.FromStrings("__name__", "up"), "one", 0)
			} else {
				broken.node(t, "one", nodes+name+".prom")
			}
			c.becomes(broken)
			var fired, reasons []string
			seen := map[string]map[string]string{}
			for alert, at := range c.fire(t, engine, rules, seen) {
				fired = append(fired, strings.Replace(alert, " one", " "+(at-began).String(), 1))
			}
			slices.Sort(fired)
			for _, s := range c.evaluate(t, engine, table) {
				reasons = append(reasons, s.Metric.Get("reason"))
			}
			slices.Sort(reasons)
			if got := strings.Join(fired, ", "); got != tt.alerts {
				t.Errorf("%q fired, want %q", got, tt.alerts)
			}
			if got := strings.Join(reasons, ", "); got != tt.reasons {
				t.Errorf("the dashboard has reasons %q, want %q", got, tt.reasons)
			}
		})
	}
}

// panels returns the queries of the dashboard by the titles of their panels, with values for Grafana's variables.
func panels(t *testing.T) map[string][]string {
	t.Helper()
	var d struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal([]byte(read(t, "deploy/kustomize/components/monitoring/ip-masq.json")), &d); err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{}
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			all[p.Title] = append(all[p.Title], strings.NewReplacer("$node", ".*", "$__rate_interval", "5m").Replace(target.Expr))
		}
	}
	return all
}

// TestDashboard checks that the queries of the dashboard parse, and that nodes have their metrics and labels.
func TestDashboard(t *testing.T) {
	var c cluster
	for _, pattern := range []string{"pkg/metrics/testdata/rich.prom", nodes + "*.prom"} {
		files, _ := filepath.Glob(filepath.Join(root, pattern))
		for _, file := range files {
			c.node(t, "one", strings.TrimPrefix(file, root))
		}
	}
	for title, queries := range panels(t) {
		for _, query := range queries {
			parsed, err := parser.NewParser(parser.Options{}).ParseExpr(query)
			if err != nil {
				t.Errorf("%s: %s: %v", title, query, err)
				continue
			}
			known, used := map[string]bool{}, map[string]bool{}
			parser.Inspect(parsed, func(n parser.Node, _ []parser.Node) error {
				switch n := n.(type) {
				case *parser.VectorSelector:
					found := false
					for _, s := range c.series {
						if s.labels.Get("__name__") == n.Name {
							found = true
							s.labels.Range(func(l labels.Label) { known[l.Name] = true })
						}
					}
					if !found {
						t.Errorf("%s: there is no metric %s", title, n.Name)
					}
					for _, m := range n.LabelMatchers {
						used[m.Name] = true
					}
				case *parser.AggregateExpr:
					for _, label := range n.Grouping {
						used[label] = true
					}
				}
				return nil
			})
			for label := range used {
				if !known[label] {
					t.Errorf("%s: %s: no metric there has label %s", title, query, label)
				}
			}
		}
	}
}
