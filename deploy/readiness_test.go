// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// TestReporter checks that the reporter asks where the reconciler answers, and has the rights that it needs and
// nothing of the node.
func TestReporter(t *testing.T) {
	for name, rights := range map[string]string{
		"node-readiness": `[map[apiGroups:[] resources:[nodes] verbs:[get]] map[apiGroups:[] resources:[nodes/status] verbs:[update]]]`,
		"all": `[map[apiGroups:[authentication.k8s.io] resources:[nodes] verbs:[impersonate:associated-node]] ` +
			`map[apiGroups:[] resources:[nodes] verbs:[impersonate-on:associated-node:get]] ` +
			`map[apiGroups:[] resources:[nodes/status] verbs:[impersonate-on:associated-node:update]]]`,
	} {
		all := objects(t, build(t, kustomizations(t)[name]))
		if got := fmt.Sprint(all["ClusterRole/ip-masq-readiness"]["rules"]); got != rights {
			t.Errorf("%s: rights %s, want %s", name, got, rights)
		}
		for object := range all {
			if kind, _, _ := strings.Cut(object, "/"); strings.HasSuffix(kind, "Role") && object != "ClusterRole/ip-masq-readiness" {
				t.Errorf("%s: %s", name, object)
			}
		}
		p := podOf(t, all["DaemonSet/ip-masq-readiness"])
		c := p.Containers[0]
		c.confined(t, nil)
		if !p.HostNetwork || len(p.Volumes) > 0 || p.SecurityContext.RunAsUser == nil || *p.SecurityContext.RunAsUser == 0 || len(p.Containers) != 1 {
			t.Errorf("%s: %+v", name, p)
		}
		env := map[string]string{}
		for _, e := range c.Env {
			env[e.Name] = e.Value
		}
		rule := all["NodeReadinessRule/ip-masq"]["spec"].(map[string]any)
		if condition := rule["conditions"].([]any)[0].(map[string]any)["type"]; env["CONDITION_TYPE"] != condition {
			t.Errorf("%s: the reporter writes %s, and the rule reads %s", name, env["CONDITION_TYPE"], condition)
		}
		if want := podOf(t, all["DaemonSet/ip-masq"]).Containers[0].ReadinessProbe.HTTPGet; env["CHECK_ENDPOINT"] != fmt.Sprintf("http://%s:%d%s", want.Host, want.Port, want.Path) {
			t.Errorf("%s: the reporter asks %s, the kubelet %+v", name, env["CHECK_ENDPOINT"], want)
		}
	}
}

// podOf returns the pod of a DaemonSet.
func podOf(t *testing.T, object map[string]any) pod {
	t.Helper()
	var d daemonSet
	text, err := json.Marshal(object)
	if err = errors.Join(err, json.Unmarshal(text, &d)); err != nil {
		t.Fatal(err)
	}
	return d.Spec.Template.Spec
}

// TestRuleSelectsNodes checks that the rule is for exactly the nodes on which pods of the DaemonSet run: others would
// keep the taint.
func TestRuleSelectsNodes(t *testing.T) {
	for _, values := range []string{
		``, `nodeSelector: {a: b}`, `excludedNodes: {type: null, some: value}`, `agentReplacement: {enabled: true}`,
		`excludedNodes: {type: null, eks.amazonaws.com/compute-type: null}`,
	} {
		all := objects(t, render(t, "nodeReadiness: {enabled: true}\n"+values))
		rule := all["NodeReadinessRule/ip-masq"]["spec"].(map[string]any)["nodeSelector"].(map[string]any)
		for name, o := range all {
			if !strings.HasPrefix(name, "DaemonSet/") {
				continue
			}
			spec := o["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
			var expressions any
			if affinity, is := spec["affinity"].(map[string]any); is {
				required := affinity["nodeAffinity"].(map[string]any)["requiredDuringSchedulingIgnoredDuringExecution"].(map[string]any)
				expressions = required["nodeSelectorTerms"].([]any)[0].(map[string]any)["matchExpressions"]
			}
			if diff := cmp.Diff(map[string]any{"l": spec["nodeSelector"], "e": expressions}, map[string]any{"l": rule["matchLabels"], "e": rule["matchExpressions"]}); diff != "" {
				t.Errorf("%s: %s (-pods +rule)\n%s", values, name, diff)
			}
		}
	}
}

// TestNodeProblemDetector runs the script as node-problem-detector does: 0 makes the condition False, 1 True, and another
// code, or none in time, Unknown.
func TestNodeProblemDetector(t *testing.T) {
	var monitor struct {
		Conditions []struct{ Type string }
		Rules      []struct {
			Type, Condition, Path, Timeout string
			Args                           []string
		}
		PluginConfig struct {
			MaxOutputLength   int  `json:"max_output_length"`
			SkipInitialStatus bool `json:"skip_initial_status"`
		}
	}
	decode(t, "npd/ip-masq.json", &monitor)
	r := monitor.Rules[0]
	// Without skip_initial_status the condition would be False before the first answer.
	if !monitor.PluginConfig.SkipInitialStatus || r.Type != "permanent" || r.Condition != monitor.Conditions[0].Type || len(r.Args) != 1 {
		t.Fatalf("%+v", monitor)
	}
	script := filepath.Join("npd", filepath.Base(r.Args[0]))
	timeout := assert.Must(time.ParseDuration(r.Timeout))(t)
	reasons := "source: some\n  more\nrules: other"
	for _, tt := range []struct {
		name   string
		answer http.HandlerFunc
		code   int
		output string
	}{
		{"ready", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") }, 0, ""},
		{"not ready", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, reasons, http.StatusServiceUnavailable) }, 1, reasons + "\n"},
		{"another server", http.NotFound, 2, "404"},
		{"no server", nil, 2, "does not answer"},
		{"no answer", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, -1, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/readyz" {
					t.Errorf("asks for %s", r.URL)
				}
				tt.answer(w, r)
			}))
			defer server.Close()
			if tt.answer == nil {
				server.Close()
			}
			wait := timeout
			if tt.code < 0 {
				wait = 200 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			defer cancel()
			c := exec.CommandContext(ctx, r.Path, script, server.URL[strings.LastIndex(server.URL, ":")+1:])
			c.Env, c.Dir = []string{}, "."
			out, err := c.Output()
			if c.ProcessState == nil || c.ProcessState.ExitCode() != tt.code || !strings.Contains(string(out), tt.output) {
				t.Errorf("%v %v: %q; want code %d and %q", c.ProcessState, err, out, tt.code, tt.output)
			}
		})
	}
	if info, err := os.Stat(script); err != nil || info.Mode()&0o111 == 0 {
		t.Errorf("%v, %v", info, err)
	}
}
