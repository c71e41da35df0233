// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// kustomize returns the path of a directory below deploy/kustomize.
func kustomize(path string) string { return filepath.Join("../../deploy/kustomize", path) }

// ImportProject imports the project's image with a tag, ip-masq-TAG.tar of Binaries.Images, on
// every node.
func (c *Cluster) ImportProject(t T, tag string) {
	t.Helper()
	for _, n := range c.Nodes {
		n.ImportProject(t, tag)
	}
}

// ImportProject imports the project's image with a tag on the node.
func (n *Node) ImportProject(t T, tag string) {
	t.Helper()
	archive, err := os.ReadFile(filepath.Join(n.cluster.options.Binaries.Images, "ip-masq-"+tag+".tar"))
	if err != nil {
		t.Fatalf("read image: %v (`make e2e-cluster` builds it and sets IPMASQ_IMAGE_DIR)", err)
	}
	assert.NoError(t, n.Runtime.Import(t.Context(), archive))
}

// ApplyDirectory runs kubectl apply -k with a directory of deploy/kustomize.
func (c *Cluster) ApplyDirectory(ctx context.Context, path string) error {
	_, err := c.Kubectl(ctx, "apply", "-k", kustomize(path))
	return err
}

// ApplyOverlay applies a kustomization with the text rest on top of directories of
// deploy/kustomize.
func (c *Cluster) ApplyOverlay(t T, rest string, directories ...string) {
	t.Helper()
	assert.Must(c.Kubectl(t.Context(), "apply", "-k", c.overlay(t, rest, directories...)))(t)
}

// overlay writes a kustomization and returns its directory. kustomize accepts only relative paths;
// COMPONENTS/ in rest is replaced by that of the components.
func (c *Cluster) overlay(t T, rest string, directories ...string) string {
	overlay := assert.Must(os.MkdirTemp(c.directory, "overlay-"))(t)
	all := assert.Must(filepath.Abs(kustomize(".")))(t)
	all = assert.Must(filepath.Rel(overlay, all))(t)
	text := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n"
	for _, directory := range directories {
		text += "- " + filepath.Join(all, directory) + "\n"
	}
	text += strings.ReplaceAll(rest, "COMPONENTS/", filepath.Join(all, "components")+"/")
	assert.NoError(t, os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), []byte(text), 0o644))
	return overlay
}

// DeleteDirectory runs kubectl delete -k and waits until the pods have ended.
func (c *Cluster) DeleteDirectory(ctx context.Context, path string) error {
	_, err := c.Kubectl(ctx, "delete", "-k", kustomize(path), "--ignore-not-found", "--cascade=foreground", "--timeout="+Patience.String())
	return err
}

// AwaitRollout waits until every pod of a DaemonSet in kube-system has its latest template and is
// ready.
func (c *Cluster) AwaitRollout(ctx context.Context, daemonSet string) error {
	_, err := c.Kubectl(ctx, "rollout", "status", "-n", "kube-system", "daemonset/"+daemonSet, "--timeout="+Patience.String())
	return err
}

// Logs returns the logs of a DaemonSet's pods in kube-system, or the error of reading them.
func (c *Cluster) Logs(ctx context.Context, daemonSet string) string {
	logs, err := c.Kubectl(ctx, "logs", "-n", "kube-system", "daemonset/"+daemonSet, "--all-pods", "--all-containers", "--prefix", "--tail=40", "--ignore-errors")
	if err != nil {
		logs += err.Error()
	}
	return logs
}

// pack makes an archive of an image for this machine.
func pack(t T, image oci.Image) []byte {
	image.Arch = runtime.GOARCH
	var archive bytes.Buffer
	assert.NoError(t, oci.Write(&archive, image))
	return archive.Bytes()
}
