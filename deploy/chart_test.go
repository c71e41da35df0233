// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/agentconfig"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// chartValues returns the values with which the chart is what each kustomization is.
func chartValues() map[string]string {
	return map[string]string{
		"base":              ``,
		"k3s":               `platform: k3s`,
		"gke":               `platform: gke`,
		"microk8s":          `platform: microk8s`,
		"openshift":         `platform: openshift`,
		"iptables":          `policy: {backend: null, guard: null}`,
		"monitoring":        `monitoring: {enabled: true}`,
		"node-readiness":    `nodeReadiness: {enabled: true}`,
		"agent-replacement": `agentReplacement: {enabled: true}`,
		"agent-monitored": `
agentReplacement: {enabled: true}
monitoring: {enabled: true}
nodeSelector: {node.kubernetes.io/masq-agent-ds-ready: "true"}`,
		"v2-configmaps": `
agentReplacement: {enabled: true}
agentConfig: {configMaps: [ip-masq-agent-config, ip-masq-agent-config-cloud]}`,
		"all": `
platform: k3s
policy: {backend: null, guard: null}
monitoring: {enabled: true}
nodeSelector: {node.kubernetes.io/masq-agent-ds-ready: "true"}
selinux: true
nodeReadiness: {enabled: true, constrainedImpersonation: true}
nodeSettings: true
bootUnit: true
image: {repository: registry.example/ip-masq-cni}`,
		"migrate-replace": `
agentReplacement: {enabled: true, args: [--backend=iptables, --masq-chain=IP-MASQ, --nomasq-all-reserved-ranges]}
updateStrategy: OnDelete`,
		"migrate-move": `
policy: {masqChain: IP-MASQ, requireAgentConfig: true}
reconciler: {agent: {nomasqAllReservedRanges: true}}
image: {iptables: true}
nodeSelector: {ip-masq.github.io/plugin: "true"}`,
		"migrate-uninstall": `
uninstall: {enabled: true}
updateStrategy: OnDelete
image: {iptables: true}
nodeSelector: {ip-masq.github.io/plugin: uninstall}`,
		"uninstall":            `uninstall: {enabled: true}`,
		"uninstall-k3s":        "uninstall: {enabled: true}\nplatform: k3s",
		"uninstall-gke":        "uninstall: {enabled: true}\nplatform: gke",
		"uninstall-microk8s":   "uninstall: {enabled: true}\nplatform: microk8s",
		"uninstall-openshift":  "uninstall: {enabled: true}\nplatform: openshift",
		"uninstall-iptables":   "uninstall: {enabled: true}\npolicy: {backend: iptables}",
		"uninstall-keep-rules": `uninstall: {enabled: true, args: [--keep-rules]}`,
		"all-uninstall": `
enabled: true # a condition of an umbrella chart
uninstall: {enabled: true}
platform: k3s
image: {iptables: true}
nodeSelector: {node.kubernetes.io/masq-agent-ds-ready: "true"}
selinux: true
nodeSettings: true
bootUnit: true
monitoring: {enabled: true}
nodeReadiness: {enabled: true}`,
	}
}

// ownValues returns values for what no kustomization has.
func ownValues() map[string]string {
	const own = `
policy:
  dataDir: /var/lib/cni/other
  masqChain: OTHER
  nonMasqueradeCIDRs: []
reconciler:
  resync_interval: 90
  log_format: json
  agent: {toPorts: "1024-2047", cidrLimit: 1000000, nonMasqueradeCIDRs: [10.0.0.0/8, 192.168.0.0/16]}
  conflist: {network: podnet}
agentConfig: {config: {nonMasqueradeCIDRs: [10.0.0.0/8], masqLinkLocal: true, resyncInterval: 30s}}
bootUnit: true
bootUnitDir: /srv/units
cniConfDir: /srv/net.d
cniBinDir: /srv/bin
containerdStateDir: /srv/containerd
image:
  tag: v9
  digest: sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
  pullPolicy: IfNotPresent
imagePullSecrets: [{name: one}, {name: "2"}]
nameOverride: other
fullnameOverride: other-full
commonLabels: {of: all}
podLabels: {of-pods: "true"}
podAnnotations: {about: pods}
serviceAccount: {create: true, annotations: {about: accounts}}
excludedNodes: {type: null, some: value}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}]}, {matchFields: [{key: metadata.name, operator: In, values: [b]}]}]
    preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1, preference: {matchExpressions: [{key: c, operator: Exists}]}}]
tolerations: [{key: some, operator: Exists}]
priorityClassName: other-critical
extraEnv: [{name: GOMEMLIMIT, value: 200MiB}]
minReadySeconds: 7
maxUnavailable: 3
resources: {limits: {memory: 1Gi}}
healthPort: 1
metrics: {enabled: true, port: 2}
`
	return map[string]string{
		"chart-values":           own,
		"chart-values-uninstall": own + "uninstall: {enabled: true, args: [--no-wait]}",
		"chart-values-agent": `
healthPort: 1
metrics: {enabled: true, address: 127.0.0.1}
agentReplacement: {enabled: true, args: [--masq-chain=IP-MASQ, "--v=2"]}
serviceAccount: {name: named}
extraEnv: [{name: GOMEMLIMIT, value: 200MiB}]
monitoring: {enabled: false, labels: {release: some}}
nodeReadiness:
  enabled: true
  image: registry.example/reporter:v1
  interval: 1m
  enforcementMode: bootstrap-only
  dryRun: true
  resources: {limits: {memory: 1Gi}}`,
	}
}

const namespace = "kube-system"

// helm runs helm with a values file, and returns its output, or its error output.
func helm(t *testing.T, values string, args ...string) ([]byte, error) {
	t.Helper()
	c := exec.Command(binary(t, "deploy/helm"), append([]string{"--namespace", namespace, "--values", "-"}, args...)...)
	home := t.TempDir()
	c.Env = append(os.Environ(), "HOME="+home, "XDG_CACHE_HOME=", "XDG_CONFIG_HOME=", "XDG_DATA_HOME=", "KUBECONFIG="+filepath.Join(home, "none"))
	var stdout, stderr bytes.Buffer
	c.Stdin, c.Stdout, c.Stderr = strings.NewReader(values), &stdout, &stderr
	if err := c.Run(); err != nil {
		return nil, fmt.Errorf("%w: %s%s", err, &stderr, &stdout)
	}
	return stdout.Bytes(), nil
}

// rendered caches the chart's manifests by values and arguments.
var rendered = map[string][]byte{}

// render returns the chart's manifests.
func render(t *testing.T, values string, args ...string) []byte {
	t.Helper()
	key := values + "\n" + strings.Join(args, " ")
	if rendered[key] == nil {
		out := assert.Must(helm(t, values, append([]string{"template", "some-release", "chart"}, args...)...))(t)
		rendered[key] = out
	}
	return rendered[key]
}

// objects returns manifests by kind and name. What has no order is sorted.
func objects(t *testing.T, manifests []byte) map[string]map[string]any {
	t.Helper()
	all := map[string]map[string]any{}
	for _, document := range strings.Split("\n"+string(manifests), "\n---\n") {
		var o map[string]any
		assert.NoError(t, yaml.Unmarshal([]byte(document), &o))
		if o == nil {
			continue
		}
		name := fmt.Sprintf("%s/%s", o["kind"], o["metadata"].(map[string]any)["name"])
		if all[name] != nil {
			t.Errorf("two of %s", name)
		}
		sortNamed(o)
		all[name] = o
	}
	return all
}

// sortNamed sorts the lists below a value whose order means nothing in a pod, by name.
func sortNamed(value any) {
	switch value := value.(type) {
	case map[string]any:
		for key, v := range value {
			if list, is := v.([]any); is && (key == "volumes" || key == "volumeMounts" || key == "env") {
				slices.SortStableFunc(list, func(a, b any) int { return strings.Compare(fmt.Sprint(named(a)), fmt.Sprint(named(b))) })
			}
			sortNamed(v)
		}
	case []any:
		for _, v := range value {
			sortNamed(v)
		}
	}
}

func named(item any) any {
	if m, is := item.(map[string]any); is {
		return m["name"]
	}
	return item
}

// chartLabels has the labels of each object of the chart, except commonLabels.
func chartLabels(component any) map[string]any {
	return map[string]any{
		"app.kubernetes.io/name": "ip-masq", "app.kubernetes.io/component": component, "app.kubernetes.io/instance": "some-release",
		"app.kubernetes.io/version": "v0.1.0", "app.kubernetes.io/managed-by": "Helm", "helm.sh/chart": "ip-masq-0.1.0",
	}
}

// withoutChartLabels removes from an object the labels that every object of the chart has, and that a
// kustomization has not.
func withoutChartLabels(t *testing.T, o, without map[string]any) {
	t.Helper()
	metadata := o["metadata"].(map[string]any)
	labels, is := metadata["labels"].(map[string]any)
	kept, _ := without["metadata"].(map[string]any)["labels"].(map[string]any)
	for key, value := range chartLabels(labels["app.kubernetes.io/component"]) {
		if !is || labels[key] != value || value == nil {
			t.Errorf("%s %s: label %s is %v, want %s", o["kind"], metadata["name"], key, labels[key], value)
		}
		if kept[key] == nil {
			delete(labels, key)
		}
	}
	if len(labels) == 0 {
		delete(metadata, "labels")
	}
}

// TestChartEqualsKustomize compares the chart's objects with those of each kustomization. They differ
// in the labels of objects. The chart's DaemonSet to uninstall replaces the other one, under its name, so that the
// controller starts its pods only where the others have ended.
func TestChartEqualsKustomize(t *testing.T) {
	values := chartValues()
	for name, dir := range kustomizations(t) {
		t.Run(name, func(t *testing.T) {
			v, known := values[name]
			if !known {
				t.Fatal("chartValues has no values for it")
			}
			manifests := nameHash().ReplaceAll(build(t, dir), []byte("$1"))
			want := objects(t, bytes.ReplaceAll(manifests, []byte("ip-masq-uninstall"), []byte("ip-masq")))
			if name == "all" { // no pod mounts it, because of component node-settings
				delete(want, "ConfigMap/ip-masq")
			}
			got := objects(t, render(t, v, "--skip-tests"))
			for name, o := range want {
				if got[name] != nil {
					withoutChartLabels(t, got[name], o)
				}
			}
			assert.Equal(t, "chart", got, want)
		})
	}
}

// TestChartFiles checks that the files of the chart are those of kustomize: a chart and a
// kustomization have only files in their own directories.
func TestChartFiles(t *testing.T) {
	for file, of := range map[string]string{
		"rules.yaml": "monitoring", "ip-masq.json": "monitoring",
	} {
		text := assert.Must(os.ReadFile(filepath.Join("kustomize/components", of, file)))(t)
		golden.Check(t, filepath.Join("chart/files", file), text)
	}
}

// TestChartValid checks that Kubernetes accepts the objects, and the program their arguments.
func TestChartValid(t *testing.T) {
	all := chartValues()
	maps.Copy(all, ownValues())
	for name, values := range all {
		t.Run(name, func(t *testing.T) {
			manifests := render(t, values)
			wantValid(t, manifests)
			wantArgumentsTaken(t, daemonSetsIn(t, manifests)[0].Spec.Template.Spec)
		})
	}
}

// TestChartGolden shows what values do that no kustomization has.
func TestChartGolden(t *testing.T) {
	for name, values := range ownValues() {
		golden.Check(t, filepath.Join("testdata/golden", name+".yaml"), render(t, values))
	}
}

// TestChartNamespace checks that alerts and rights are about the namespace of the release.
func TestChartNamespace(t *testing.T) {
	out, err := helm(t, `{platform: openshift, monitoring: {enabled: true, labels: {release: some}}, nodeReadiness: {enabled: true}}`,
		"template", "some-release", "chart", "--namespace=other")
	assert.NoError(t, err)
	if bytes.Contains(out, []byte(namespace)) {
		t.Errorf("%s is named in\n%s", namespace, out)
	}
	if label := "\n    release: some\n"; strings.Count(string(out), label) != 2 {
		t.Errorf("PodMonitor and PrometheusRule lack %q", label)
	}
}

// TestChartPod checks that the pod of `helm test` has no more of the node than those of the DaemonSet.
func TestChartPod(t *testing.T) {
	for name, values := range chartValues() {
		if strings.Contains(name, "uninstall") {
			continue
		}
		t.Run(name, func(t *testing.T) {
			all := objects(t, render(t, values))
			o := all["Pod/ip-masq-test"]
			if o == nil {
				t.Fatal("there is no test")
			}
			got := o["spec"].(map[string]any)
			var want map[string]any
			for name, o := range all {
				if strings.HasPrefix(name, "DaemonSet/") && name != "DaemonSet/ip-masq-readiness" {
					want = o["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
				}
			}
			c, of := got["containers"].([]any)[0].(map[string]any), want["containers"].([]any)[0].(map[string]any)
			for key := range c {
				if key != "name" && key != "args" && !cmp.Equal(c[key], of[key]) {
					t.Errorf("%s: %v, of the DaemonSet %v", key, c[key], of[key])
				}
			}
			for key := range got {
				if key != "containers" && key != "restartPolicy" && !cmp.Equal(got[key], want[key]) {
					t.Errorf("%s: %v, of the DaemonSet %v", key, got[key], want[key])
				}
			}
			var args []string
			for _, arg := range c["args"].([]any) {
				args = append(args, arg.(string))
			}
			wantTaken(t, args)
		})
	}
}

// settings returns the files that the ConfigMap ip-masq has for values.
func settings(t *testing.T, values string) map[string]any {
	t.Helper()
	all := objects(t, render(t, values))
	o := all["ConfigMap/ip-masq"]
	if o == nil {
		o = all["ConfigMap/other-full"] // of ownValues
	}
	return o["data"].(map[string]any)
}

// parsed returns a plugin entry as the plugin parses it.
func parsed(t *testing.T, entry []byte) (config.Entry, error) {
	t.Helper()
	netconf := assert.Must(config.NetconfInList(entry, "podnet", "1.0.0"))(t)
	return netconf.Entry()
}

// entryOf returns the plugin entry that has the policy of values, and only that.
func entryOf(t *testing.T, values string) []byte {
	t.Helper()
	var v struct{ Policy map[string]any }
	assert.NoError(t, yaml.Unmarshal([]byte(values), &v))
	entry := map[string]any{"type": "ip-masq"}
	maps.Copy(entry, v.Policy)
	text := assert.Must(json.Marshal(entry))(t)
	return text
}

// TestChartPolicy checks that the plugin reads from the entry the policy that values have.
func TestChartPolicy(t *testing.T) {
	const unset = "backend: null, guard: null, "
	for _, policy := range []string{
		`backend: null, guard: null`,
		`backend: auto, guard: "off", nonMasqueradeCIDRs: []`,
		`backend: auto, guard: off`, // false in YAML 1.1
		unset + `nonMasqueradeCIDRs: [10.0.0.0/8, 192.0.2.128/25, 0.0.0.0/0, 10.1.2.3/32, 172.16.0.0/12], masqueradeCIDRs: [10.9.0.0/16]`,
		unset + `enableIPv6: true, nonMasqueradeCIDRs: ["fd00::/8", "::/0", "2001:db8:1:2:3:4:5:6/128"], masqLinkLocalIPv6: true, masqLinkLocal: false`,
		strings.Join(policytest.Every(t, "", ": "), ", "),
		unset + `masqLinkLocal: false, outputInterfaces: ["a-b.c_d@1~"], toPorts: "1024-29999,32768-65535,7", masqChain: a.b_c-D1, cidrLimit: 1000000`,
		unset + `podCIDRs: [10.1.0.0/16], requireAgentConfig: true, dataDir: /var/lib/cni/other`,
		`backend: iptables, guard: drop, bypassMark: "0", toPorts: "", staleConnections: keep`,
		unset + `nonMasqueradeCIDRs: [10.0.0.0/8, 10.0.0.0/8], cidrLimit: 1`,
	} {
		t.Run(policy, func(t *testing.T) {
			values := "policy: {" + policy + "}"
			text := []byte(settings(t, values)["entry.json"].(string))
			got, err := parsed(t, text)
			if err != nil {
				t.Fatalf("%v\n%s", err, text)
			}
			stated := strings.NewReplacer("backend: null", "", "guard: null", "", "guard: off", `guard: "off"`).Replace(policy)
			want := assert.Must(parsed(t, entryOf(t, "policy: {"+strings.TrimLeft(stated, ", ")+"}")))(t)
			assert.Equal(t, "entry", fmt.Sprintf("%+v", jsonOf(t, got)), fmt.Sprintf("%+v", jsonOf(t, want)))
		})
	}
}

func jsonOf(t *testing.T, v any) string {
	t.Helper()
	text := assert.Must(json.MarshalIndent(v, "", " "))(t)
	return string(text)
}

// TestChartSettings checks that the reconciler reads the settings and the agents' file.
func TestChartSettings(t *testing.T) {
	values := ownValues()["chart-values"]
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		assert.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	s := config.DefaultSettings()
	assert.NoError(t, s.Read(write("reconciler.toml", settings(t, values)["reconciler.toml"].(string))))
	got := map[string]string{}
	for _, x := range s.List() {
		if x.Origin != config.DefaultOrigin {
			got[x.Key] = x.Value
		}
	}
	want := map[string]string{
		"resync_interval": "1m30s", "log_format": "json", "conflist.network": "podnet",
		"agent.masqChain": "OTHER", "agent.toPorts": "1024-2047", "agent.cidrLimit": "1000000", "agent.nonMasqueradeCIDRs": "10.0.0.0/8,192.168.0.0/16",
	}
	assert.Equal(t, "settings", got, want)
	write("ip-masq-agent", objects(t, render(t, values))["ConfigMap/ip-masq-agent"]["data"].(map[string]any)["config"].(string))
	files, err := agentconfig.Read(dir, config.DialectV1, config.AgentPolicy{})
	if err != nil || len(files.Warnings) > 0 || files.ResyncInterval.Seconds() != 30 {
		t.Errorf("%v, %v, %+v", err, files.Warnings, files)
	}
	if p := files.Source.Policies(); len(p) != 1 || fmt.Sprint(p[0].NonMasqueradeCIDRs) != "[10.0.0.0/8]" || !*p[0].MasqLinkLocal {
		t.Errorf("%+v", p)
	}
}

// TestChartSlashes checks that a slash at the end of a directory has no effect.
func TestChartSlashes(t *testing.T) {
	values := "policy:\n  dataDir: /var/lib/cni/other/\ncniConfDir: /srv/net.d/\ncniBinDir: /srv/bin/\ncontainerdStateDir: /srv/containerd/\n"
	for _, mode := range []string{"", "uninstall: {enabled: true}\n"} {
		assert.Equal(t, "manifests with slashes", string(render(t, values+mode)), string(render(t, strings.ReplaceAll(values, "/\n", "\n")+mode)))
	}
}

// TestChartChain checks that the agents' files have the chain of the policy, where the chart writes both.
func TestChartChain(t *testing.T) {
	for values, want := range map[string]any{
		``:                       nil,
		`policy: {masqChain: A}`: "[agent]\nmasqChain = \"A\"\n",
		`{policy: {masqChain: A}, reconciler: {agent: {masqChain: A}}}`: "[agent]\nmasqChain = \"A\"\n",
		`reconciler: {agent: {guard: off}}`:                             "[agent]\nguard = \"off\"\n",
	} {
		if got := settings(t, values)["reconciler.toml"]; got != want {
			t.Errorf("%s: reconciler.toml is %v, want %v", values, got, want)
		}
	}
	render(t, `{policy: {masqChain: A}, nodeSettings: true, agentConfig: {config: {masqChain: B}}}`)
	render(t, `{policy: {masqChain: A}, agentReplacement: {enabled: true}, agentConfig: {config: {masqChain: B}}}`)
}

// TestChangedPolicyRollsNoPods checks that a changed entry or setting changes ConfigMaps alone, which the pods that run
// read, in the chart and in kustomizations.
func TestChangedPolicyRollsNoPods(t *testing.T) {
	daemonSet := func(values string) any { return objects(t, render(t, values))["DaemonSet/ip-masq"] }
	base := daemonSet("")
	for _, values := range []string{
		`policy: {masqLinkLocal: true}`, `policy: {masqChain: OTHER}`, `reconciler: {log_format: json}`, `agentConfig: {config: {masqLinkLocal: true}}`,
	} {
		assert.Equal(t, values, daemonSet(values), base)
	}
	for name, dir := range kustomizations(t) {
		if manifests := build(t, dir); bytes.Contains(manifests, []byte("mountPath: /etc/ip-masq\n")) && !bytes.Contains(manifests, []byte("configMap:\n          name: ip-masq\n")) &&
			!bytes.Contains(manifests, []byte("path: /etc/ip-masq\n")) {
			t.Errorf("%s: the name of the ConfigMap depends on its content", name)
		}
	}
}

// TestChartRefuses checks that mistakes in values are refused, by the key that has them. What the
// policy has is a mistake for the plugin too.
func TestChartRefuses(t *testing.T) {
	for _, c := range []struct{ values, want string }{
		{`policy: {nonMasqeradeCIDRs: []}`, `'/policy': additional properties 'nonMasqeradeCIDRs' not allowed`},
		{`policy: {nonMasqueradeCIDRs: 10.0.0.0/8}`, `'/policy/nonMasqueradeCIDRs': got string, want array`},
		{`policy: {nonMasqueradeCIDRs: [10.0.0.0/8, 10.0.0.0]}`, `'/policy/nonMasqueradeCIDRs/1': '10.0.0.0' does not match`},
		{`policy: {nonMasqueradeCIDRs: [10.0.0.0/8, 10.0.1.24/24]}`, `policy.nonMasqueradeCIDRs[1]: 10.0.1.24/24 `},
		{`policy: {nonMasqueradeCIDRs: ["fd00::/8"]}`, `policy.nonMasqueradeCIDRs[0]: fd00::/8 is an IPv6 prefix, but IPv6 is not enabled`},
		{`policy: {nonMasqueradeCIDRs: [10.0.0.0/8], masqueradeCIDRs: [10.0.0.0/8]}`, `policy.masqueradeCIDRs[0]: 10.0.0.0/8 is in nonMasqueradeCIDRs too; remove one of the two`},
		{`policy: {nonMasqueradeCIDRs: [10.0.0.0/8], masqueradeCIDRs: [10.9.0.0/16], cidrLimit: 1}`, `policy.cidrLimit: nonMasqueradeCIDRs and masqueradeCIDRs have 2 entries together`},
		{`policy: {cidrLimit: 0}`, `'/policy/cidrLimit': minimum: got 0, want 1`},
		{`policy: {guard: on}`, `'/policy/guard': value must be one of 'off', 'count', 'drop', false`}, // true in YAML 1.1
		{`policy: {outputInterfaces: [a/b]}`, `'/policy/outputInterfaces/0': 'a/b' does not match`},
		{`policy: {toPorts: "1-65536"}`, `'/policy/toPorts'`},
		{`policy: {masqChain: KUBE-MASQ}`, `'/policy/masqChain'`},
		{`policy: {bypassMark: mark}`, `'/policy/bypassMark': 'mark' does not match`},
		{`platform: k8s`, `'/platform': value must be one of 'default', 'gke', 'k3s', 'microk8s', 'openshift'`},
		{`cniConfDir: /`, `'/cniConfDir': '/' does not match`},
		{`policy: {dataDir: /srv/ip-masq}`, `'/policy/dataDir': '/srv/ip-masq' does not match`}, // which no pod mounts
		{`reconciler: {cni_conf_dir: /srv}`, `'/reconciler': additional properties 'cni_conf_dir' not allowed`},
		{`reconciler: {agent: {sourceCIDRs: [10.0.0.1/8]}}`, `reconciler.agent.sourceCIDRs[0]: 10.0.0.1/8 has`},
		{`{policy: {masqChain: A}, reconciler: {agent: {masqChain: B}}}`,
			`reconciler.agent.masqChain: B differs from policy.masqChain, A, and each chain would masquerade what the other exempts; state the chain in policy.masqChain alone`},
		{`agentConfig: {config: {masqChain: B}}`, `agentConfig.config.masqChain: B differs from policy.masqChain, IP-MASQ-AGENT, and`},
		{`{reconciler: {log_format: json}, nodeSettings: true}`, `reconciler: has no effect with nodeSettings`},
		{`agentConfig: {config: {nonMasqueradeCIDRs: [10.0.0.1/8]}}`, `agentConfig.config.nonMasqueradeCIDRs[0]: 10.0.0.1/8 has`},
		{`agentConfig: {config: {resyncInterval: often}}`, `'/agentConfig/config/resyncInterval'`},
		{`agentConfig: {config: {masqLinkLocal: true}, configMaps: [some]}`, `agentConfig.config: has no effect with agentConfig.configMaps`},
		{`nodeReadiness: {image: ""}`, `'/nodeReadiness/image': minLength: got 0, want 1`},
		{`nodeReadiness: {enforcementMode: always}`, `'/nodeReadiness/enforcementMode': value must be one of 'continuous', 'bootstrap-only'`},
		{`{nodeReadiness: {enabled: true}, affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: []}}}}`,
			`affinity.nodeAffinity: a NodeReadinessRule cannot have it`},
		{`{monitoring: {enabled: true}, metrics: {address: 127.0.0.1}}`, `metrics.address: the PodMonitor of monitoring needs the node's address`},
		{`imagePullSecrets: [registry]`, `'/imagePullSecrets/0': got string, want object`},
		{`fullnameOverride: A`, `'/fullnameOverride': 'A' does not match`},
		{`{policy: null}`, `at '': missing property 'policy'`}, // whose keys are all in comments
		{`healthPort: null`, `at '': missing property 'healthPort'`},
	} {
		t.Run(c.values, func(t *testing.T) {
			_, err := helm(t, c.values, "template", "some-release", "chart")
			assert.ErrorContains(t, err, c.want)
			if strings.HasPrefix(c.values, "policy:") && !strings.Contains(c.want, "/srv/") {
				if _, err := parsed(t, entryOf(t, c.values)); err == nil {
					t.Error("the plugin accepts it")
				}
			}
		})
	}
}

// TestChartVersion checks that the chart installs the images that the manifests name, and lists them for Artifact Hub.
func TestChartVersion(t *testing.T) {
	var chart struct {
		Version, AppVersion string
		Annotations         map[string]string
	}
	decode(t, "chart/Chart.yaml", &chart)
	image := daemonSets(t, "kustomize/base")[0].Spec.Template.Spec.Containers[0].Image
	if !strings.HasSuffix(image, ":"+chart.AppVersion) || chart.AppVersion != "v"+chart.Version {
		t.Errorf("%+v, image %s", chart, image)
	}
	reporter := podOf(t, objects(t, build(t, "kustomize/overlays/node-readiness"))["DaemonSet/ip-masq-readiness"]).Containers[0].Image
	for _, image := range []string{image, image + "-iptables", reporter} {
		if !strings.Contains(chart.Annotations["artifacthub.io/images"], "image: "+image+"\n") {
			t.Errorf("artifacthub.io/images lacks %s", image)
		}
	}
}

// TestChartLint checks that helm has nothing to say about the chart.
func TestChartLint(t *testing.T) {
	if out, err := helm(t, "", "lint", "chart", "--strict", "--quiet"); err != nil || len(bytes.TrimSpace(out)) > 0 {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestChartNotes checks that the notes name objects that there are.
func TestChartNotes(t *testing.T) {
	for values, want := range map[string]string{
		``:                                  "kubectl -n kube-system rollout status daemonset/ip-masq\n",
		`agentReplacement: {enabled: true}`: "kubectl -n kube-system rollout status daemonset/ip-masq-agent\n",
		`policy: {masqLinkLocal: true}`:     "A changed policy reaches the nodes within two minutes, without a restart.",
		`uninstall: {enabled: true}`:        "helm uninstall some-release --namespace kube-system\n",
	} {
		out, err := helm(t, values, "install", "some-release", "chart", "--dry-run=client")
		if _, notes, is := strings.Cut(string(out), "NOTES:"); err != nil || !is || !strings.Contains(notes, want) {
			t.Errorf("%s: %v, %v:\n%s", values, err, is, notes)
		}
	}
}
