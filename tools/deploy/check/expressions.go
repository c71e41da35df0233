// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"text/template"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/promql/parser"
)

// expression is a PromQL expression with the labels of its metrics that it matches or groups by.
type expression struct {
	Where   string   `json:"where"`
	Text    string   `json:"text"`
	Metrics []string `json:"metrics"`
	Labels  []string `json:"labels"`
}

// expression parses an expression; it returns nil on an error.
func (r *result) expression(where, text string) parser.Expr {
	parsed, err := parser.NewParser(parser.Options{}).ParseExpr(text)
	if err != nil {
		r.mistake(fmt.Errorf("%s: %s: %w", where, text, err))
		return nil
	}
	metrics, labels := map[string]bool{}, map[string]bool{}
	parser.Inspect(parsed, func(n parser.Node, _ []parser.Node) error {
		switch n := n.(type) {
		case *parser.VectorSelector:
			for _, m := range n.LabelMatchers {
				if m.Name == model.MetricNameLabel {
					metrics[m.Value] = true
				} else {
					labels[m.Name] = true
				}
			}
		case *parser.AggregateExpr:
			for _, label := range n.Grouping {
				labels[label] = true
			}
		}
		return nil
	})
	if len(metrics) == 0 {
		r.mistake(fmt.Errorf("%s: %s: is about no metric", where, text))
	}
	r.Expressions = append(r.Expressions, expression{where, text, slices.Sorted(maps.Keys(metrics)), slices.Sorted(maps.Keys(labels))})
	return parsed
}

// rule checks an alert: its expression, and that its texts use only labels of the result.
func (r *result) rule(of string, rule monitoring.Rule) {
	where := of + ": " + rule.Alert
	if rule.Alert == "" || rule.Record != "" {
		r.mistake(fmt.Errorf("%s: is not an alert", where))
	}
	if rule.For != nil {
		if _, err := model.ParseDuration(string(*rule.For)); err != nil {
			r.mistake(fmt.Errorf("%s: for: %w", where, err))
		}
	}
	for _, key := range []string{"summary", "description", "runbook_url"} {
		if rule.Annotations[key] == "" {
			r.mistake(fmt.Errorf("%s: has no %s", where, key))
		}
	}
	if rule.Labels["severity"] == "" {
		r.mistake(fmt.Errorf("%s: has no severity", where))
	}
	parsed := r.expression(where, rule.Expr.String())
	if parsed == nil {
		return
	}
	labels := map[string]string{}
	for _, label := range left(parsed) {
		labels[label] = "value"
	}
	for key, text := range rule.Annotations {
		if err := render(text, labels); err != nil {
			r.mistake(fmt.Errorf("%s: %s: %w", where, key, err))
		}
	}
}

// left returns the labels of an expression's result if an aggregation on the left side sets them.
func left(e parser.Expr) []string {
	switch e := e.(type) {
	case *parser.AggregateExpr:
		if !e.Without {
			return e.Grouping
		}
	case *parser.ParenExpr:
		return left(e.Expr)
	case *parser.BinaryExpr:
		return append(slices.Clone(left(e.LHS)), left(e.RHS)...)
	}
	return nil
}

// render renders a text as Prometheus does, with these labels only.
func render(text string, labels map[string]string) error {
	t, err := template.New("text").Option("missingkey=error").Parse("{{$labels := .Labels}}{{$value := .Value}}" + text)
	if err != nil {
		return err
	}
	return t.Execute(io.Discard, map[string]any{"Labels": labels, "Value": 1.0})
}

// dashboard checks a Grafana dashboard.
func (r *result) dashboard(where string, text []byte) {
	var d struct {
		Title  string
		UID    string
		Panels []struct {
			ID      int
			Title   string
			Type    string
			Targets []struct{ Expr string }
		}
		Templating struct {
			List []struct{ Name, Type, Definition string }
		}
	}
	if err := json.Unmarshal(text, &d); err != nil {
		r.mistake(fmt.Errorf("%s: %w", where, err))
		return
	}
	if d.Title == "" || d.UID == "" || len(d.Panels) == 0 {
		r.mistake(fmt.Errorf("%s: is no dashboard", where))
	}
	variables := map[string]bool{"__rate_interval": true}
	for _, v := range d.Templating.List {
		variables[v.Name] = true
		if v.Type != "query" {
			continue
		}
		asks := regexp.MustCompile(`^label_values\((\w+), ?(\w+)\)$`).FindStringSubmatch(v.Definition)
		if asks == nil {
			r.mistake(fmt.Errorf("%s: variable %s: %q is not understood here", where, v.Name, v.Definition))
			continue
		}
		r.expression(where+": variable "+v.Name, asks[1])
	}
	ids := map[int]bool{}
	for _, p := range d.Panels {
		at := where + ": " + p.Title
		if ids[p.ID] || p.Title == "" || p.Type == "" || len(p.Targets) == 0 {
			r.mistake(fmt.Errorf("%s: is no panel, or has another's id", at))
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			query, err := substituted(target.Expr, variables)
			if err != nil {
				r.mistake(fmt.Errorf("%s: %w", at, err))
				continue
			}
			r.expression(at, query)
		}
	}
}

// substituted replaces Grafana's variables by values.
func substituted(query string, variables map[string]bool) (string, error) {
	var errs []error
	query = regexp.MustCompile(`\$\w+`).ReplaceAllStringFunc(query, func(name string) string {
		switch name = name[1:]; {
		case !variables[name]:
			errs = append(errs, fmt.Errorf("there is no variable %s", name))
		case strings.HasSuffix(name, "interval"):
			return "5m"
		}
		return "value"
	})
	return query, errors.Join(errs...)
}
