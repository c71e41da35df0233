// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// NetworkTests are the network tests of Kubernetes.
type NetworkTests struct {
	programs string   // those of tools/sig-network
	reports  string   // the output and the report of each run
	archives [][]byte // of images
	agnhost  string   // the image with most of the programs
	further  []string // its other names
}

// FindNetworkTests finds the programs in the directories that environment variables of `make e2e-kubernetes` name, and
// makes the images that the tests run.
func FindNetworkTests(t T) *NetworkTests {
	t.Helper()
	programs, dns := os.Getenv("IPMASQ_SIG_NETWORK_DIR"), os.Getenv("IPMASQ_COREDNS_DIR")
	if programs == "" || dns == "" {
		t.Fatalf("`make e2e-kubernetes` builds the programs and sets IPMASQ_SIG_NETWORK_DIR and IPMASQ_COREDNS_DIR")
	}
	tests := &NetworkTests{programs: programs, reports: filepath.Join(topology.BinDir(t), "sig-network")}
	tests.makeImages(t, dns)
	return tests
}

// dnsObjects are objects for CoreDNS, with the names that kubeadm gives them. It also answers for the name that a test
// looks up on the Internet.
const dnsObjects = `apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: coredns}
rules:
- {apiGroups: [""], resources: [namespaces, pods, services], verbs: [list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: coredns}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: coredns}
subjects: [{kind: ServiceAccount, name: coredns, namespace: kube-system}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: coredns, namespace: kube-system}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: coredns, namespace: kube-system}
data:
  Corefile: |
    .:53 {
      errors
      ready
      cache 30
      hosts {
        8.8.8.8 google.com
        fallthrough
      }
      kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
      }
    }
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: coredns, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: kube-dns}}
  template:
    metadata: {labels: {k8s-app: kube-dns}}
    spec:
      serviceAccountName: coredns
      dnsPolicy: Default
      containers:
      - name: coredns
        image: %s
        command: [/coredns]
        args: [-conf, /etc/coredns/Corefile]
        readinessProbe: {httpGet: {path: /ready, port: 8181}, periodSeconds: 1}
        volumeMounts: [{name: config, mountPath: /etc/coredns}]
      volumes: [{name: config, configMap: {name: coredns}}]
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  clusterIP: %s
  selector: {k8s-app: kube-dns}
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
`

// StartDNS starts CoreDNS, and imports the images of the tests on every node.
func (tests *NetworkTests) StartDNS(t T, c *Cluster) {
	t.Helper()
	ctx := t.Context()
	for _, n := range c.Nodes {
		for _, archive := range tests.archives {
			assert.NoError(t, n.Runtime.Import(ctx, archive))
		}
		for _, name := range tests.further {
			ctr := filepath.Join(c.options.Binaries.Containerd, "ctr")
			assert.NoError(t, n.Run(ctx, ctr, "--namespace", "k8s.io", "images", "tag", tests.agnhost, name))
		}
	}
	assert.NoError(t, c.Apply(ctx, fmt.Sprintf(dnsObjects, tests.agnhost, dnsAddress())))
	assert.Must(c.Kubectl(ctx, "rollout", "status", "-n", "kube-system", "deployment/coredns", "--timeout="+Patience.String()))(t)
}

// makeImages makes the images that the tests run, under the names that they use. One image has most of their programs;
// Debian's stand in for those of the bases.
func (tests *NetworkTests) makeImages(t T, dns string) {
	listed := assert.Must(exec.CommandContext(t.Context(), filepath.Join(tests.programs, "network.test"), "--list-images").Output())(t)
	names := map[string]string{}
	for _, name := range strings.Fields(string(listed)) {
		repository, _, _ := strings.Cut(path.Base(name), ":")
		// Of two versions of agnhost the tests run the newer one.
		names[repository] = max(name, names[repository])
	}
	var programs []oci.File
	for _, program := range []string{
		tests.programs + "/agnhost", tests.programs + "/localhost.crt", tests.programs + "/localhost.key", dns + "/coredns", tests.programs + "/regression-issue-74839",
	} {
		programs = append(programs, oci.File{Name: filepath.Base(program), Mode: 0o755, Data: assert.Must(os.ReadFile(program))(t)})
	}
	tests.agnhost = names["agnhost"]
	tests.further = []string{names["busybox"], names["glibc-dns-testing"], names["pause"]}
	for _, image := range []oci.Image{
		{Name: tests.agnhost, Layers: [][]oci.File{debianFiles(t), programs}, Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"}, Env: []string{"PATH=/usr/bin:/bin"}},
		{Name: names["regression-issue-74839"], Layers: [][]oci.File{programs[4:]}, Entrypoint: []string{"/regression-issue-74839"}},
	} {
		tests.archives = append(tests.archives, pack(t, image))
	}
}

// debianFiles returns the programs that tests run in pods. Those that have no package of their own are busybox's.
func debianFiles(t T) []oci.File {
	programs := map[string]string{"bin/sh": "/bin/dash", "bin/busybox": "/bin/busybox"}
	for _, name := range []string{"bash", "curl", "dig", "getent", "ip", "nc", "ss", "wget"} {
		programs["usr/bin/"+name] = assert.Must(exec.LookPath(name))(t)
	}
	files := programFiles(t, programs)
	applets := assert.Must(exec.CommandContext(t.Context(), "/bin/busybox", "--list").Output())(t)
	for _, applet := range strings.Fields(string(applets)) {
		if name := "bin/" + applet; programs[name] == "" && programs["usr/"+name] == "" {
			files = append(files, oci.File{Name: name, Mode: 0o777 | fs.ModeSymlink, Link: "busybox"})
		}
	}
	return append(files, oci.File{Name: "tmp", Mode: fs.ModeDir | 0o777}, oci.File{Name: "uploads", Mode: fs.ModeDir | 0o755})
}

// NetworkTest is the result of one test.
type NetworkTest struct {
	Name string
	// State is passed, skipped, failed or another word for a failure.
	State string
	// Message is the reason of a failure, or for which a test skipped itself.
	Message string
	// Attempts is the number of attempts.
	Attempts int
}

// Run runs the tests that the options of ginkgo select, eight at once. A test that fails runs once more, as many have
// time limits that a slow machine exceeds. Failed tests are no error.
func (tests *NetworkTests) Run(t T, c *Cluster, name string, options ...string) []NetworkTest {
	t.Helper()
	directory := filepath.Join(tests.reports, name)
	assert.NoError(t, os.RemoveAll(directory))
	assert.NoError(t, os.MkdirAll(directory, 0o755))
	args := append([]string{"--procs=8", "--flake-attempts=2", "--no-color", "--timeout=1h", "--json-report=report.json", "--output-dir=" + directory}, options...)
	args = append(args, filepath.Join(tests.programs, "network.test"), "--",
		"--kubeconfig="+c.plane.admin, "--kubectl-path="+filepath.Join(c.options.Binaries.Kubernetes, "kubectl"),
		"--provider=skeleton", fmt.Sprintf("--num-nodes=%d", len(c.Nodes)), "--e2e-output-dir="+directory)
	cmd := c.control.Command(t.Context(), filepath.Join(tests.programs, "ginkgo"), args...)
	cmd.Dir = directory
	output, failed := c.asAdministrator(cmd)
	assert.NoError(t, os.WriteFile(filepath.Join(directory, "output.txt"), []byte(output), 0o644))
	text, err := os.ReadFile(filepath.Join(directory, "report.json"))
	if err != nil {
		t.Fatalf("read report: %v: %v", err, failed)
	}
	var suites []struct {
		SpecReports []struct {
			ContainerHierarchyTexts           []string
			LeafNodeType, LeafNodeText, State string
			NumAttempts                       int
			Failure                           struct{ Message string }
		}
	}
	assert.NoError(t, json.Unmarshal(text, &suites))
	var results []NetworkTest
	for _, suite := range suites {
		for _, spec := range suite.SpecReports {
			// What was not selected is skipped without a message.
			if spec.State == "skipped" && spec.Failure.Message == "" || spec.State == "passed" && spec.LeafNodeType != "It" {
				continue
			}
			name := strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " ")
			results = append(results, NetworkTest{name, spec.State, spec.Failure.Message, spec.NumAttempts})
		}
	}
	return results
}
