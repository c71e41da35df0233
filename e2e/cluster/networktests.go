// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
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
func FindNetworkTests(ctx context.Context) (*NetworkTests, error) {
	own, err := topology.BinDir()
	if err != nil {
		return nil, err
	}
	t := &NetworkTests{programs: os.Getenv("IPMASQ_SIG_NETWORK_DIR"), reports: filepath.Join(own, "sig-network")}
	if err := t.makeImages(ctx, os.Getenv("IPMASQ_COREDNS_DIR")); err != nil {
		return nil, fmt.Errorf("make images: %w (`make e2e-kubernetes` builds their programs and sets IPMASQ_SIG_NETWORK_DIR and IPMASQ_COREDNS_DIR)", err)
	}
	return t, nil
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
func (t *NetworkTests) StartDNS(ctx context.Context, c *Cluster) error {
	for _, n := range c.Nodes {
		for _, archive := range t.archives {
			if err := n.Runtime.Import(ctx, archive); err != nil {
				return err
			}
		}
		for _, name := range t.further {
			ctr := filepath.Join(c.options.Binaries.Containerd, "ctr")
			if err := n.Run(ctx, ctr, "--namespace", "k8s.io", "images", "tag", t.agnhost, name); err != nil {
				return err
			}
		}
	}
	if err := c.Apply(ctx, fmt.Sprintf(dnsObjects, t.agnhost, dnsAddress())); err != nil {
		return err
	}
	_, err := c.Kubectl(ctx, "rollout", "status", "-n", "kube-system", "deployment/coredns", "--timeout="+Patience.String())
	return err
}

// makeImages makes the images that the tests run, under the names that they use. One image has most of their programs;
// Debian's stand in for those of the bases.
func (t *NetworkTests) makeImages(ctx context.Context, dns string) error {
	listed, err := exec.CommandContext(ctx, filepath.Join(t.programs, "network.test"), "--list-images").Output()
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	names := map[string]string{}
	for _, name := range strings.Fields(string(listed)) {
		repository, _, _ := strings.Cut(path.Base(name), ":")
		// Of two versions of agnhost the tests run the newer one.
		names[repository] = max(name, names[repository])
	}
	base, err := debianFiles(ctx)
	if err != nil {
		return err
	}
	var programs []oci.File
	for _, program := range []string{
		t.programs + "/agnhost", t.programs + "/localhost.crt", t.programs + "/localhost.key", dns + "/coredns", t.programs + "/regression-issue-74839",
	} {
		data, err := os.ReadFile(program)
		if err != nil {
			return err
		}
		programs = append(programs, oci.File{Name: filepath.Base(program), Mode: 0o755, Data: data})
	}
	t.agnhost = names["agnhost"]
	t.further = []string{names["busybox"], names["glibc-dns-testing"], names["pause"]}
	for _, image := range []oci.Image{
		{Name: t.agnhost, Layers: [][]oci.File{base, programs}, Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"}, Env: []string{"PATH=/usr/bin:/bin"}},
		{Name: names["regression-issue-74839"], Layers: [][]oci.File{programs[4:]}, Entrypoint: []string{"/regression-issue-74839"}},
	} {
		archive, err := pack(image)
		if err != nil {
			return err
		}
		t.archives = append(t.archives, archive)
	}
	return nil
}

// debianFiles returns the programs that tests run in pods. Those that have no package of their own are busybox's.
func debianFiles(ctx context.Context) ([]oci.File, error) {
	programs := map[string]string{"bin/sh": "/bin/dash", "bin/busybox": "/bin/busybox"}
	for _, name := range []string{"bash", "curl", "dig", "getent", "ip", "nc", "ss", "wget"} {
		program, err := exec.LookPath(name)
		if err != nil {
			return nil, fmt.Errorf("find a program of the images: %w", err)
		}
		programs["usr/bin/"+name] = program
	}
	files, err := programFiles(ctx, programs)
	if err != nil {
		return nil, err
	}
	applets, err := exec.CommandContext(ctx, "/bin/busybox", "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list applets of busybox: %w", err)
	}
	for _, applet := range strings.Fields(string(applets)) {
		if name := "bin/" + applet; programs[name] == "" && programs["usr/"+name] == "" {
			files = append(files, oci.File{Name: name, Mode: 0o777 | fs.ModeSymlink, Link: "busybox"})
		}
	}
	return append(files, oci.File{Name: "tmp", Mode: fs.ModeDir | 0o777}, oci.File{Name: "uploads", Mode: fs.ModeDir | 0o755}), nil
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
func (t *NetworkTests) Run(ctx context.Context, c *Cluster, name string, options ...string) ([]NetworkTest, error) {
	directory := filepath.Join(t.reports, name)
	if err := os.RemoveAll(directory); err != nil {
		return nil, fmt.Errorf("remove earlier report: %w", err)
	}
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return nil, err
	}
	args := append([]string{"--procs=8", "--flake-attempts=2", "--no-color", "--timeout=1h", "--json-report=report.json", "--output-dir=" + directory}, options...)
	args = append(args, filepath.Join(t.programs, "network.test"), "--",
		"--kubeconfig="+c.plane.admin, "--kubectl-path="+filepath.Join(c.options.Binaries.Kubernetes, "kubectl"),
		"--provider=skeleton", fmt.Sprintf("--num-nodes=%d", len(c.Nodes)), "--e2e-output-dir="+directory)
	cmd := c.control.Command(ctx, filepath.Join(t.programs, "ginkgo"), args...)
	cmd.Dir = directory
	output, failed := c.asAdministrator(cmd)
	if err := os.WriteFile(filepath.Join(directory, "output.txt"), []byte(output), 0o644); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(directory, "report.json"))
	if err != nil {
		return nil, fmt.Errorf("read report: %w: %w", err, failed)
	}
	var suites []struct {
		SpecReports []struct {
			ContainerHierarchyTexts           []string
			LeafNodeType, LeafNodeText, State string
			NumAttempts                       int
			Failure                           struct{ Message string }
		}
	}
	if err := json.Unmarshal(text, &suites); err != nil {
		return nil, fmt.Errorf("decode report: %w", err)
	}
	var tests []NetworkTest
	for _, suite := range suites {
		for _, spec := range suite.SpecReports {
			// What was not selected is skipped without a message.
			if spec.State == "skipped" && spec.Failure.Message == "" || spec.State == "passed" && spec.LeafNodeType != "It" {
				continue
			}
			name := strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " ")
			tests = append(tests, NetworkTest{name, spec.State, spec.Failure.Message, spec.NumAttempts})
		}
	}
	return tests, nil
}
