// SPDX-License-Identifier: Apache-2.0

//go:build promtool

package alerts

import (
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// notation returns the values of a series, each minute, as promtool's unit tests have them: 1x59 is the value 1 sixty times.
func (s series) notation() string {
	var all []string
	was, times := "", 0
	flush := func() {
		switch {
		case times == 0:
		case was == "_" || was == "stale":
			all = append(all, strings.TrimSuffix(strings.Repeat(was+" ", times), " "))
		default:
			all = append(all, fmt.Sprintf("%sx%d", was, times-1))
		}
	}
	for at := time.Duration(0); at <= watch; at += step {
		sample := "_"
		if v, there := s.values(at, s.was); there && math.IsNaN(v) {
			sample = "stale"
		} else if there {
			sample = fmt.Sprint(v)
		}
		if sample != was {
			flush()
			was, times = sample, 0
		}
		times++
	}
	flush()
	return strings.Join(all, " ")
}

// TestPromtool lets promtool check the rules, and evaluate them on the metrics of each broken node.
func TestPromtool(t *testing.T) {
	promtool := filepath.Join(os.Getenv("IPMASQ_PROMTOOL_DIR"), "promtool")
	dir := t.TempDir()
	write := func(name string, content any) string {
		path := filepath.Join(dir, name)
		text, err := yaml.Marshal(content)
		if err == nil {
			err = os.WriteFile(path, text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(promtool, args...).CombinedOutput(); err != nil {
			t.Fatalf("promtool %q: %v\n%s", args, err, out)
		}
	}
	rules := write("rules.yaml", map[string]any{"groups": []any{map[string]any{"name": "ip-masq", "rules": alerts(t)}}})
	run("check", "rules", "--lint=all", "--lint-fatal", rules)
	var tests []any
	for name, broken := range brokenNodes() {
		c := broken.cluster(t, name)
		var input []any
		for _, s := range c.series {
			l := s.labels.Map()
			metric := l["__name__"]
			delete(l, "__name__")
			var pairs []string
			for key, value := range l {
				pairs = append(pairs, fmt.Sprintf("%s=%q", key, value))
			}
			input = append(input, map[string]any{"series": metric + "{" + strings.Join(pairs, ",") + "}", "values": s.notation()})
		}
		fired := []any{}
		if alert, _, fires := strings.Cut(broken.alerts, " "); fires {
			fired = append(fired, map[string]any{"labels": fmt.Sprintf("{alertname=%q}", alert), "value": 1})
		}
		tests = append(tests, map[string]any{
			"name": name, "interval": "1m", "input_series": input,
			"promql_expr_test": []any{map[string]any{
				"expr": `count by (alertname) (ALERTS{alertstate="firing"})`, "eval_time": "95m", "exp_samples": fired,
			}},
		})
	}
	run("test", "rules", write("tests.yaml", map[string]any{"rule_files": []string{rules}, "evaluation_interval": "1m", "tests": tests}))
}
