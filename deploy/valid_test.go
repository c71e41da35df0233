// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"bytes"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// invalid returns what kubeconform says about manifests, with the schemas of k8s.io/api, and what no schema can express.
func invalid(t *testing.T, manifests []byte) string {
	t.Helper()
	schemas := filepath.Join(filepath.Dir(binary(t, "deploy/kubeconform")), "kubernetes", "{{.ResourceKind}}{{.KindSuffix}}.json")
	c := exec.Command(binary(t, "deploy/kubeconform"), "-strict", "-schema-location", schemas, "-")
	c.Stdin = bytes.NewReader(manifests)
	out, err := c.CombinedOutput()
	said := string(out)
	if (err == nil) != (said == "") {
		t.Fatalf("%v: %q", err, said)
	}
	for _, document := range strings.Split(string(manifests), "\n---\n") {
		var o struct {
			Metadata struct{ Name string }
			Spec     struct {
				Selector struct{ MatchLabels map[string]string }
				Template *struct {
					Metadata struct{ Labels map[string]string }
				}
			}
		}
		if err := yaml.Unmarshal([]byte(document), &o); err != nil || o.Spec.Template == nil {
			continue // kubeconform's job, or no pods
		}
		for key, value := range o.Spec.Selector.MatchLabels {
			if o.Spec.Template.Metadata.Labels[key] != value {
				said += fmt.Sprintf("%s selects pods with %s=%s, which its own do not have\n", o.Metadata.Name, key, value)
			}
		}
	}
	return said
}

func wantValid(t *testing.T, manifests []byte) {
	t.Helper()
	if said := invalid(t, manifests); said != "" {
		t.Error(said)
	}
}

// TestValid checks that Kubernetes accepts the objects.
func TestValid(t *testing.T) {
	for name, dir := range kustomizations(t) {
		t.Run(name, func(t *testing.T) { wantValid(t, build(t, dir)) })
	}
}

// TestInvalid checks that mistakes in manifests are found.
func TestInvalid(t *testing.T) {
	const valid = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: some}
spec:
  selector: {matchLabels: {app: some}}
  template:
    metadata: {labels: {app: some}}
    spec:
      containers: [{name: one, image: "some:v1", resources: {limits: {cpu: 1}}, ports: [{containerPort: 1}]}]
`
	for _, c := range []struct{ old, new, want string }{
		{"", "", ""},
		{"containers:", "container:", "additional properties 'container' not allowed"},
		{`"some:v1"`, "[a]", "got array, want string"},
		{"containerPort: 1", "containerPort: one", "got string, want integer"},
		{"{containerPort: 1}", "{}", "missing property 'containerPort'"},
		{"cpu: 1", "cpu: [1]", "got array, want "},
		{"kind: DaemonSet", "kind: DaemonSet\nkind: DaemonSet", "already set"},
		{"kind: DaemonSet", "kind: DaemonSets", "could not find schema for DaemonSets"},
		{"matchLabels: {app: some}", "matchLabels: {app: other}", "which its own do not have"},
	} {
		said := invalid(t, []byte(strings.Replace(valid, c.old, c.new, 1)))
		if !strings.Contains(said, c.want) || c.want == "" && said != "" {
			t.Errorf("%s: %q, want %q", c.new, said, c.want)
		}
	}
}
