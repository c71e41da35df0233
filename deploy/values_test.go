// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
)

// value is a value of the chart, such as image.tag, with its default and the first sentence of the comment above it.
type value struct{ path, standard, comment string }

// chartDefaults returns the values that values.yaml has: those of policy that are unset, too.
func chartDefaults(t *testing.T) []value {
	t.Helper()
	text := assert.Must(os.ReadFile("chart/values.yaml"))(t)
	// An unset key of policy is a comment, with an example.
	text = regexp.MustCompile(`(?m)^  # (\w+): .*$`).ReplaceAll(text, []byte("  $1: unset"))
	var document yaml.Node
	assert.NoError(t, yaml.Unmarshal(text, &document))
	var all []value
	var add func(parent string, n *yaml.Node)
	add = func(parent string, n *yaml.Node) {
		for i := 0; i < len(n.Content); i += 2 {
			key, v := n.Content[i], n.Content[i+1]
			path := strings.TrimPrefix(parent+"."+key.Value, ".")
			blocks := strings.Split(key.HeadComment, "\n\n")
			comment := strings.Join(strings.Fields(strings.NewReplacer("# ", "", "#\n", "").Replace(blocks[len(blocks)-1])), " ")
			comment, unset, _ := strings.Cut(comment, " Unset: ")
			if first, _, more := strings.Cut(comment, ". "); more {
				comment = first + "."
			}
			standard := assert.Must(yaml.Marshal(v))(t)
			nested := v.Kind == yaml.MappingNode && len(v.Content) > 0 && path != "resources" && path != "nodeReadiness.resources" && path != "excludedNodes"
			switch {
			case nested && comment != "":
				all = append(all, value{path: path, comment: comment})
				fallthrough
			case nested:
				add(path, v)
			case v.Value == "unset":
				all = append(all, value{path, strings.TrimSuffix(unset, "."), comment})
			default:
				v.HeadComment, v.FootComment = "", ""
				all = append(all, value{path, strings.Join(strings.Fields(flow(t, v, string(standard))), " "), comment})
			}
		}
	}
	add("", document.Content[0])
	return all
}

// flow returns a default as one line of YAML.
func flow(t *testing.T, v *yaml.Node, standard string) string {
	t.Helper()
	var decoded any
	err := v.Decode(&decoded)
	if v.Kind == yaml.ScalarNode {
		return regexp.MustCompile(`(?m)^#.*$| +#.*$`).ReplaceAllString(standard, "")
	}
	v.Style |= yaml.FlowStyle
	for _, n := range v.Content {
		n.HeadComment, n.FootComment, n.LineComment = "", "", ""
		if n.Kind != yaml.ScalarNode {
			n.Style |= yaml.FlowStyle
		}
	}
	text, err2 := yaml.Marshal(v)
	assert.NoError(t, errors.Join(err, err2))
	return string(text)
}

// TestChartReadme compares the table of values in the chart's README with values.yaml. -update writes it.
func TestChartReadme(t *testing.T) {
	const head = "\n| value | default | meaning |\n|---|---|---|\n"
	text, err := os.ReadFile("chart/README.md")
	before, rest, found := bytes.Cut(text, []byte(head))
	if err != nil || !found {
		t.Fatalf("%v: the table of values is not there", err)
	}
	var table strings.Builder
	for _, v := range chartDefaults(t) {
		standard := v.standard
		if standard != "" {
			standard = "`" + standard + "`"
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s |\n", v.path, standard, strings.ReplaceAll(v.comment, "|", "\\|"))
	}
	_, after, _ := bytes.Cut(rest, []byte("\n\n"))
	want := string(before) + head + table.String()
	if len(after) > 0 {
		want += "\n" + string(after)
	}
	golden.Check(t, "chart/README.md", []byte(want))
}

// TestChartValuesUsed renders the chart with another value for each one in values.yaml: the objects are then others.
// Values of policy have TestChartPolicy.
func TestChartValuesUsed(t *testing.T) {
	base := map[string]string{ // what a value needs to have an effect
		"monitoring.labels": "monitoring.enabled=true", "metrics.address": "metrics.enabled=true", "metrics.port": "metrics.enabled=true",
		"agentReplacement.args": "agentReplacement.enabled=true", "bootUnitDir": "bootUnit=true", "uninstall.args": "uninstall.enabled=true",
		"containerdStateDir": "uninstall.enabled=true", "serviceAccount.annotations": "serviceAccount.create=true",
	}
	other := map[string]string{
		"agentConfig.config": "agentConfig.config.masqLinkLocal=true", "agentConfig.configMaps": "agentConfig.configMaps={some}",
		"agentReplacement.enabled": "agentReplacement.enabled=true", "agentReplacement.args": "agentReplacement.args={--v=2}", "platform": "platform=k3s",
		"cniConfDir": "cniConfDir=/srv", "cniBinDir": "cniBinDir=/srv", "containerdStateDir": "containerdStateDir=/srv", "selinux": "selinux=true",
		"nodeSettings": "nodeSettings=true", "bootUnit": "bootUnit=true", "bootUnitDir": "bootUnitDir=/srv/units", "reconciler": "reconciler.log_format=json", "image.repository": "image.repository=some", "image.tag": "image.tag=v9",
		"image.digest": "image.digest=sha256:" + strings.Repeat("0", 64), "image.iptables": "image.iptables=true", "image.pullPolicy": "image.pullPolicy=Always",
		"imagePullSecrets": "imagePullSecrets[0].name=some", "nameOverride": "nameOverride=some", "fullnameOverride": "fullnameOverride=some",
		"commonLabels": "commonLabels.a=b", "podLabels": "podLabels.a=b", "podAnnotations": "podAnnotations.a=b", "serviceAccount.create": "serviceAccount.create=true",
		"serviceAccount.name": "serviceAccount.name=some", "serviceAccount.annotations": "serviceAccount.annotations.a=b", "nodeSelector": "nodeSelector.a=b",
		"excludedNodes": "excludedNodes.a=b", "affinity": "affinity.podAntiAffinity.a=b", "tolerations": "tolerations[0].key=some", "priorityClassName": "priorityClassName=some",
		"extraEnv": "extraEnv[0].name=A", "updateStrategy": "updateStrategy=OnDelete", "maxUnavailable": "maxUnavailable=1", "minReadySeconds": "minReadySeconds=1",
		"resources": "resources.limits.memory=1Gi", "healthPort": "healthPort=1", "metrics.enabled": "metrics.enabled=true", "metrics.address": "metrics.address=127.0.0.1",
		"metrics.port": "metrics.port=1", "monitoring.enabled": "monitoring.enabled=true", "monitoring.labels": "monitoring.labels.a=b",
		"nodeReadiness.enabled": "nodeReadiness.enabled=false", "nodeReadiness.image": "nodeReadiness.image=some", "nodeReadiness.interval": "nodeReadiness.interval=1s",
		"nodeReadiness.enforcementMode": "nodeReadiness.enforcementMode=bootstrap-only", "nodeReadiness.dryRun": "nodeReadiness.dryRun=true",
		"nodeReadiness.constrainedImpersonation": "nodeReadiness.constrainedImpersonation=true", "nodeReadiness.resources": "nodeReadiness.resources.limits.memory=1Gi",
		"uninstall.enabled": "uninstall.enabled=true", "uninstall.args": "uninstall.args={--no-wait}",
	}
	for _, v := range chartDefaults(t) {
		if strings.HasPrefix(v.path, "policy.") || v.standard == "" || v.path == "enabled" {
			continue
		}
		set, needs := other[v.path], base[v.path]
		if strings.HasPrefix(v.path, "nodeReadiness") {
			needs = "nodeReadiness.enabled=true"
		}
		if set == "" {
			t.Errorf("%s: no other value is tested", v.path)
			continue
		}
		t.Run(v.path, func(t *testing.T) {
			t.Parallel()
			without, err := helm(t, "", "template", "some-release", "chart", "--set", needs)
			with, err2 := helm(t, "", "template", "some-release", "chart", "--set", needs, "--set", set)
			if err := errors.Join(err, err2); err != nil || bytes.Equal(with, without) {
				t.Errorf("--set %s has no effect: %v", set, err)
			}
		})
	}
}

// TestChartDependency checks that a chart can have this one as a dependency with a condition.
func TestChartDependency(t *testing.T) {
	parent := t.TempDir()
	assert.NoError(t, os.CopyFS(filepath.Join(parent, "charts", "ip-masq"), os.DirFS("chart")))
	const about = "apiVersion: v2\nname: parent\nversion: 1.0.0\ndependencies: [{name: ip-masq, version: 0.1.0, condition: ip-masq.enabled}]\n"
	assert.NoError(t, os.WriteFile(filepath.Join(parent, "Chart.yaml"), []byte(about), 0o600))
	for enabled, want := range map[bool]int{true: 1, false: 0} {
		out, err := helm(t, fmt.Sprintf("{global: {some: value}, ip-masq: {enabled: %t}}", enabled), "template", "some-release", parent)
		if got := bytes.Count(out, []byte("kind: DaemonSet")); err != nil || got != want {
			t.Errorf("enabled %t: %d DaemonSets, %v", enabled, got, err)
		}
	}
}

// TestChartObjects checks that the names and labels of every object follow the values that every chart has.
func TestChartObjects(t *testing.T) {
	const all = "commonLabels: {of: all}\nmonitoring: {enabled: true}\nnodeReadiness: {enabled: true}\nserviceAccount: {create: true}\n"
	for _, values := range []string{
		"nameOverride: other", "fullnameOverride: other", "nameOverride: unused\nfullnameOverride: other\nagentReplacement: {enabled: true}",
	} {
		out := render(t, all+values)
		for id, o := range objects(t, out) {
			kind, name, _ := strings.Cut(id, "/")
			labels, _ := o["metadata"].(map[string]any)["labels"].(map[string]any)
			if !regexp.MustCompile(`^other(-readiness|-dashboard|-test)?$`).MatchString(name) {
				t.Errorf("%s: %s", values, id)
			}
			for key := range chartLabels("any") {
				if labels[key] == nil || labels["of"] != "all" {
					t.Errorf("%s: %s %s has labels %v", values, kind, name, labels)
				}
			}
		}
	}
}
