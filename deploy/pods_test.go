// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// daemonSet has the fields of a DaemonSet that the tests check; the golden files show the others.
type daemonSet struct {
	Kind     string
	Metadata struct{ Name, Namespace string }
	Spec     struct {
		UpdateStrategy struct {
			Type          string
			RollingUpdate struct{ MaxUnavailable string }
		}
		Template struct {
			Metadata struct{ Labels map[string]string }
			Spec     pod
		}
	}
}

type pod struct {
	HostNetwork                   bool
	HostPID, HostIPC              bool
	AutomountServiceAccountToken  *bool
	PriorityClassName             string
	TerminationGracePeriodSeconds int
	Tolerations                   []map[string]string
	SecurityContext               struct {
		RunAsUser      *int
		SeccompProfile struct{ Type string }
	}
	InitContainers, Containers []container
	Volumes                    []volume
}

type container struct {
	Name, Image     string
	Command, Args   []string
	Env             []struct{ Name, Value string }
	SecurityContext struct {
		Privileged, AllowPrivilegeEscalation, ReadOnlyRootFilesystem *bool
		Capabilities                                                 struct{ Add, Drop []string }
	}
	Resources struct {
		Requests, Limits map[string]string
	}
	StartupProbe, LivenessProbe, ReadinessProbe *probe
	VolumeMounts                                []struct {
		Name, MountPath string
		ReadOnly        bool
	}
}

type probe struct {
	HTTPGet struct {
		Host, Path string
		Port       int
	}
}

type volume struct {
	Name      string
	HostPath  *struct{ Path, Type string }
	ConfigMap *struct {
		Name     string
		Optional bool
	}
}

// daemonSets returns the project's DaemonSets of a kustomization.
func daemonSets(t *testing.T, dir string) []daemonSet {
	t.Helper()
	return daemonSetsIn(t, build(t, dir))
}

// daemonSetsIn returns the DaemonSets of manifests, of which there must be one beside that of the reporter.
func daemonSetsIn(t *testing.T, manifests []byte) []daemonSet {
	t.Helper()
	var all []daemonSet
	for _, document := range strings.Split(string(manifests), "\n---\n") {
		var d daemonSet
		assert.NoError(t, yaml.Unmarshal([]byte(document), &d))
		if d.Kind == "DaemonSet" && d.Spec.Template.Metadata.Labels["app.kubernetes.io/component"] != "readiness" {
			all = append(all, d)
		}
	}
	if len(all) != 1 {
		t.Fatalf("%d DaemonSets", len(all))
	}
	return all
}

// TestConfined checks that the pods get only the node's resources that they need.
func TestConfined(t *testing.T) {
	for name, dir := range kustomizations(t) {
		t.Run(name, func(t *testing.T) {
			d := daemonSets(t, dir)[0]
			p := d.Spec.Template.Spec
			if d.Metadata.Namespace != "kube-system" || !p.HostNetwork || p.HostPID || p.HostIPC || p.PriorityClassName != "system-node-critical" ||
				p.AutomountServiceAccountToken == nil || *p.AutomountServiceAccountToken || p.TerminationGracePeriodSeconds > 30 {
				t.Errorf("%+v", d)
			}
			if !cmp.Equal(p.Tolerations, []map[string]string{{"operator": "Exists"}}) {
				t.Errorf("tolerations %v: a node with a taint would be left out", p.Tolerations)
			}
			if p.SecurityContext.SeccompProfile.Type != "RuntimeDefault" || p.SecurityContext.RunAsUser == nil || *p.SecurityContext.RunAsUser != 0 {
				t.Errorf("security context %+v", p.SecurityContext)
			}
			if u := d.Spec.UpdateStrategy; u.Type != "OnDelete" && (u.Type != "RollingUpdate" || !strings.HasSuffix(u.RollingUpdate.MaxUnavailable, "%")) {
				t.Errorf("update strategy %+v", u)
			}
			withIPTables := strings.HasSuffix(p.Containers[0].Image, "-iptables")
			capabilities := []string{"NET_ADMIN"}
			if withIPTables {
				capabilities = append(capabilities, "NET_RAW")
			}
			for _, c := range p.InitContainers {
				c.confined(t, nil)
			}
			for _, c := range p.Containers {
				c.confined(t, capabilities)
			}
			wantMounts(t, p, withIPTables)
		})
	}
}

func (c container) confined(t *testing.T, capabilities []string) {
	t.Helper()
	s := c.SecurityContext
	if s.Privileged != nil || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
		t.Errorf("%s: %+v", c.Name, s)
	}
	if !slices.Equal(s.Capabilities.Drop, []string{"ALL"}) || !slices.Equal(s.Capabilities.Add, capabilities) {
		t.Errorf("%s: capabilities %+v, want ALL dropped and %q added", c.Name, s.Capabilities, capabilities)
	}
	if c.Resources.Requests["memory"] == "" || c.Resources.Requests["cpu"] == "" || c.Resources.Limits["memory"] == "" || c.Resources.Limits["cpu"] != "" {
		t.Errorf("%s: resources %+v", c.Name, c.Resources)
	}
	for _, p := range []*probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
		// Without a host the kubelet would connect to the pod's address, which has no listener.
		if p != nil && (p.HTTPGet.Host != "127.0.0.1" || p.HTTPGet.Port != 19820) {
			t.Errorf("%s: probe %+v", c.Name, p)
		}
	}
}

// wantMounts checks that directories of the node keep their paths, every volume is used, and the
// agents' ConfigMap is optional.
func wantMounts(t *testing.T, p pod, withIPTables bool) {
	t.Helper()
	volumes, used := map[string]volume{}, map[string]bool{}
	for _, v := range p.Volumes {
		volumes[v.Name] = v
		if v.ConfigMap != nil && v.ConfigMap.Name == "ip-masq-agent" && !v.ConfigMap.Optional {
			t.Errorf("volume %+v", v)
		}
	}
	for _, c := range slices.Concat(p.InitContainers, p.Containers) {
		for _, m := range c.VolumeMounts {
			v, known := volumes[m.Name]
			used[m.Name] = true
			switch {
			case !known:
				t.Errorf("%s: there is no volume %s", c.Name, m.Name)
			case v.HostPath != nil && v.HostPath.Path != m.MountPath:
				t.Errorf("%s: %s is mounted at %s", c.Name, v.HostPath.Path, m.MountPath)
			}
		}
	}
	if left := slices.Sorted(maps.Keys(volumes)); !slices.Equal(left, slices.Sorted(maps.Keys(used))) {
		t.Errorf("volumes %q, used %q", left, slices.Sorted(maps.Keys(used)))
	}
	lock := volumes["xtables-lock"].HostPath
	if withIPTables != (lock != nil && lock.Path == "/run/xtables.lock" && lock.Type == "FileOrCreate") {
		t.Errorf("xtables lock %+v, image with iptables %v", lock, withIPTables)
	}
}

// entrypoint returns the image's entrypoint.
func entrypoint(t *testing.T) []string {
	t.Helper()
	source := assert.Must(os.ReadFile("image/main.go"))(t)
	found := regexp.MustCompile(`\[\]string\{"/ip-masq-reconciler", "([^"]+)"\}`).FindSubmatch(source)
	if found == nil {
		t.Fatal("no entrypoint in image/main.go")
	}
	return []string{binary(t, "ip-masq-reconciler"), string(found[1])}
}

// wantArgumentsTaken checks the arguments of the pod's containers, with their variables replaced.
func wantArgumentsTaken(t *testing.T, p pod) {
	t.Helper()
	for _, c := range slices.Concat(p.InitContainers, p.Containers) {
		args := slices.Clone(c.Args)
		for i := range args {
			args[i] = regexp.MustCompile(`\$\((\w+)\)`).ReplaceAllStringFunc(args[i], func(name string) string {
				for _, e := range c.Env {
					if "$("+e.Name+")" != name {
						continue
					}
					if e.Name == "NODE_IP" {
						return "fd00::1" // of the downward API; IPv6 is what breaks it
					}
					return e.Value
				}
				t.Errorf("%s: %s: there is no such variable", c.Name, args[i])
				return ""
			})
		}
		wantTaken(t, args)
	}
}

// TestPreview checks that Kubernetes accepts the pod of the preview, that the program accepts its
// arguments, and that it has no more of the node than the DaemonSet that replaces the agent.
func TestPreview(t *testing.T) {
	const file = "kustomize/preview.yaml"
	text := assert.Must(os.ReadFile(file))(t)
	wantValid(t, text)
	var preview struct{ Spec pod }
	decode(t, file, &preview)
	wantArgumentsTaken(t, preview.Spec)
	got, want := preview.Spec.Containers[0], daemonSets(t, "kustomize/overlays/agent-replacement")[0].Spec.Template.Spec.Containers[0]
	got.confined(t, want.SecurityContext.Capabilities.Add)
	if got.Image != want.Image {
		t.Errorf("image %s, want %s", got.Image, want.Image)
	}
	if preview.Spec.AutomountServiceAccountToken == nil || *preview.Spec.AutomountServiceAccountToken || slices.ContainsFunc(preview.Spec.Volumes, func(v volume) bool { return v.HostPath != nil }) {
		t.Errorf("%+v", preview.Spec)
	}
}

// TestAgentsArguments checks that it accepts the arguments of either agent's DaemonSet.
func TestAgentsArguments(t *testing.T) {
	for _, args := range [][]string{
		{}, {"--v=2"}, {"--masq-chain=IP-MASQ"}, {"--masq-chain=IP-MASQ", "--nomasq-all-reserved-ranges"},
		{"--nomasq-all-reserved-ranges=true", "--enable-ipv6=true", "--random-fully=false", "--resync-interval=60", "--to-ports=1024-29999"},
		{"-masq-chain", "IP-MASQ", "-v", "2", "--logtostderr", "--stderrthreshold=INFO"},
	} {
		wantTaken(t, args)
	}
}

// wantTaken runs the entrypoint with arguments and --help, which is printed after all are parsed.
func wantTaken(t *testing.T, args []string) {
	t.Helper()
	all := append(entrypoint(t), args...)
	c := exec.Command(all[0], append(all[1:], "--help")...)
	if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--help") {
		t.Errorf("%q: %v\n%s", args, err, out)
	}
}

// TestImages checks that all images of the project have one tag.
func TestImages(t *testing.T) {
	tags := map[string]bool{}
	for _, dir := range kustomizations(t) {
		p := daemonSets(t, dir)[0].Spec.Template.Spec
		for _, c := range slices.Concat(p.InitContainers, p.Containers) {
			name, tag, _ := strings.Cut(c.Image, ":")
			if !strings.HasSuffix(name, "/ip-masq-cni") {
				t.Errorf("%s: image %s", dir, c.Image)
			}
			if c.Image != p.Containers[0].Image {
				t.Errorf("%s: %s and %s in one pod", dir, c.Image, p.Containers[0].Image)
			}
			tags[strings.TrimSuffix(tag, "-iptables")] = true
		}
	}
	if len(tags) != 1 {
		t.Errorf("tags %v", tags)
	}
}

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
