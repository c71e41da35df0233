// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
)

// reporterImage is the image that the manifests name.
const reporterImage = "registry.k8s.io/node-readiness-controller/node-readiness-reporter:v0.5.0"

// StartReadinessController installs NodeReadinessRule, starts node-readiness-controller on the control plane's host, and
// imports the image of its reporter on every node. The programs are those of a directory that tools/node-readiness filled.
func (c *Cluster) StartReadinessController(ctx context.Context, programs string) error {
	if _, err := c.Kubectl(ctx, "create", "-f", filepath.Join(programs, "crd.yaml")); err != nil {
		return err
	}
	if _, err := c.control.StartDaemon("node-readiness-controller", nil, filepath.Join(programs, "controller"),
		"--kubeconfig="+c.plane.admin, "--metrics-bind-address=0", "--health-probe-bind-address=127.0.0.1:8081"); err != nil {
		return err
	}
	reporter, err := os.ReadFile(filepath.Join(programs, "reporter"))
	if err != nil {
		return fmt.Errorf("read reporter: %w (`make e2e-readiness` builds it)", err)
	}
	archive, err := pack(oci.Image{
		Name: reporterImage, Layers: [][]oci.File{{{Name: "reporter", Mode: 0o755, Data: reporter}}}, Entrypoint: []string{"/reporter"},
	})
	if err != nil {
		return err
	}
	for _, n := range c.Nodes {
		if err := n.Runtime.Import(ctx, archive); err != nil {
			return err
		}
	}
	return nil
}

// StartProblemDetector starts node-problem-detector on the node, with the files of deploy/npd.
func (n *Node) StartProblemDetector(programs string) error {
	for _, file := range []string{"ip-masq.json", "ip-masq-ready.sh"} {
		text, err := os.ReadFile(filepath.Join("../../deploy/npd", file))
		if err == nil {
			err = n.WriteFile("/custom-config/"+file, string(text), 0o644)
		}
		if err != nil {
			return fmt.Errorf("install %s: %w", file, err)
		}
	}
	api := n.cluster.plane.url + "?inClusterConfig=false&auth=" + url.QueryEscape(n.cluster.plane.admin)
	_, err := n.StartDaemon("node-problem-detector", []string{"NODE_NAME=" + n.Name}, filepath.Join(programs, "node-problem-detector"),
		"--apiserver-override="+api, "--config.custom-plugin-monitor=/custom-config/ip-masq.json",
		"--hostname-override="+n.Name, "--port=0", "--prometheus-port=0", "--logtostderr")
	return err
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
