// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"net/url"
	"os"
	"path/filepath"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// reporterImage is the image that the manifests name.
const reporterImage = "registry.k8s.io/node-readiness-controller/node-readiness-reporter:v0.5.0"

// StartReadinessController installs NodeReadinessRule, starts node-readiness-controller on the control plane's host, and
// imports the image of its reporter on every node. The programs are those of a directory that tools/node-readiness filled.
func (c *Cluster) StartReadinessController(t T, programs string) {
	t.Helper()
	ctx := t.Context()
	assert.Must(c.Kubectl(ctx, "create", "-f", filepath.Join(programs, "crd.yaml")))(t)
	assert.Must(c.control.StartDaemon("node-readiness-controller", nil, filepath.Join(programs, "controller"),
		"--kubeconfig="+c.plane.admin, "--metrics-bind-address=0", "--health-probe-bind-address=127.0.0.1:8081"))(t)
	reporter := assert.Must(os.ReadFile(filepath.Join(programs, "reporter")))(t)
	archive := pack(t, oci.Image{
		Name: reporterImage, Layers: [][]oci.File{{{Name: "reporter", Mode: 0o755, Data: reporter}}}, Entrypoint: []string{"/reporter"},
	})
	for _, n := range c.Nodes {
		assert.NoError(t, n.Runtime.Import(ctx, archive))
	}
}

// StartProblemDetector starts node-problem-detector on the node, with the files of deploy/npd.
func (n *Node) StartProblemDetector(t T, programs string) {
	t.Helper()
	for _, file := range []string{"ip-masq.json", "ip-masq-ready.sh"} {
		text := assert.Must(os.ReadFile(filepath.Join("../../deploy/npd", file)))(t)
		assert.NoError(t, n.WriteFile("/custom-config/"+file, string(text), 0o644))
	}
	api := n.cluster.plane.url + "?inClusterConfig=false&auth=" + url.QueryEscape(n.cluster.plane.admin)
	assert.Must(n.StartDaemon("node-problem-detector", []string{"NODE_NAME=" + n.Name}, filepath.Join(programs, "node-problem-detector"),
		"--apiserver-override="+api, "--config.custom-plugin-monitor=/custom-config/ip-masq.json",
		"--hostname-override="+n.Name, "--port=0", "--prometheus-port=0", "--logtostderr"))(t)
}

// Condition returns the status and the message of a condition of the node; both are empty without it.
func (n *Node) Condition(ctx context.Context, kind string) (status, message string, err error) {
	var node struct {
		Status struct{ Conditions []condition }
	}
	if err := n.cluster.Get(ctx, &node, "node", n.Name); err != nil {
		return "", "", err
	}
	for _, c := range node.Status.Conditions {
		if c.Type == kind {
			return c.Status, c.Message, nil
		}
	}
	return "", "", nil
}
