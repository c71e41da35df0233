// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"strings"
	"testing"
)

const daemonSet = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: some}
spec:
  selector: {matchLabels: {app: some}}
  template:
    metadata: {labels: {app: some}}
    spec:
      containers: [{name: one, image: "some:v1"}]
`

const rules = `apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: {name: some}
spec:
  groups:
    - name: group
      rules:
        - alert: Some
          expr: max by (node) (some_metric{kind="a"}) > 1
          for: 10m
          labels: {severity: warning}
          annotations: {summary: "On {{ $labels.node }}", description: text, runbook_url: "https://example.com"}
`

const dashboard = `apiVersion: v1
kind: ConfigMap
metadata: {name: some, labels: {grafana_dashboard: "1"}}
data:
  some.json: |
    {"title": "Some", "uid": "some", "templating": {"list": [{"name": "node", "type": "query", "definition": "label_values(some_metric, node)"}]},
     "panels": [{"id": 1, "title": "Panel", "type": "stat", "targets": [{"expr": "rate(other_total{node=~\"$node\"}[$__rate_interval])"}]}]}
`

func TestSound(t *testing.T) {
	var out, mistakes bytes.Buffer
	if code := run(strings.NewReader(daemonSet+"---\n"+rules+"---\n"+dashboard), &out, &mistakes); code != 0 || mistakes.Len() > 0 {
		t.Errorf("exit code %d\n%s", code, &mistakes)
	}
	const want = `{"objects":["DaemonSet/some","PrometheusRule/some","ConfigMap/some"],"expressions":[` +
		`{"where":"PrometheusRule/some: Some","text":"max by (node) (some_metric{kind=\"a\"}) \u003e 1","metrics":["some_metric"],"labels":["kind","node"]},` +
		`{"where":"ConfigMap/some: some.json: variable node","text":"some_metric","metrics":["some_metric"],"labels":[]},` +
		`{"where":"ConfigMap/some: some.json: Panel","text":"rate(other_total{node=~\"value\"}[5m])","metrics":["other_total"],"labels":["node"]}]}` + "\n"
	if got := strings.ReplaceAll(out.String(), "null", "[]"); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

func TestMistakes(t *testing.T) {
	for _, c := range []struct{ name, in, old, new, want string }{
		{"nothing", "", "", "", "no object given"},
		{"no such field", daemonSet, "containers:", "container:", `unknown field "container"`},
		{"another type", daemonSet, `"some:v1"`, "[a]", "cannot unmarshal array"},
		{"twice", daemonSet, "kind: DaemonSet", "kind: DaemonSet\nkind: DaemonSet", `already set`},
		{"no such kind", daemonSet, "DaemonSet", "DaemonSets", "is no kind that is known here"},
		{"selector", daemonSet, "matchLabels: {app: some}", "matchLabels: {app: other}", "which its own do not have"},
		{"expression", rules, "> 1", "> > 1", "parse error"},
		{"no function", rules, "max by", "most by", "parse error"},
		{"constant", rules, `max by (node) (some_metric{kind="a"})`, "vector(1)", "is about no metric"},
		{"label", rules, "$labels.node", "$labels.nodes", `no entry for key "nodes"`},
		{"template", rules, "{{ $labels.node }}", "{{ $labels.node }", "unexpected"},
		{"duration", rules, "10m", "10 minutes", "for:"},
		{"runbook", rules, "runbook_url", "runbook", "has no runbook_url"},
		{"severity", rules, "severity:", "grade:", "has no severity"},
		{"dashboard", dashboard, `"title": "Some"`, `"title": "Some`, "invalid character"},
		{"variable", dashboard, "$node", "$host", "there is no variable host"},
		{"query", dashboard, "[$__rate", "$__rate", "parse error"},
	} {
		t.Run(c.name, func(t *testing.T) {
			changed := strings.Replace(c.in, c.old, c.new, 1)
			if changed == c.in && c.in != "" {
				t.Fatal("nothing was changed")
			}
			var out, mistakes bytes.Buffer
			if code := run(strings.NewReader(changed), &out, &mistakes); code != 1 || !strings.Contains(mistakes.String(), c.want) {
				t.Errorf("exit code %d, %q; want %q", code, &mistakes, c.want)
			}
		})
	}
}
