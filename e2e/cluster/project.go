// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
)

// kustomize returns the path of a directory below deploy/kustomize.
func kustomize(path string) string { return filepath.Join("../../deploy/kustomize", path) }

// ImportProject imports the project's image with a tag, ip-masq-TAG.tar of Binaries.Images, on
// every node.
func (c *Cluster) ImportProject(ctx context.Context, tag string) error {
	for _, n := range c.Nodes {
		if err := n.ImportProject(ctx, tag); err != nil {
			return err
		}
	}
	return nil
}

// ImportProject imports the project's image with a tag on the node.
func (n *Node) ImportProject(ctx context.Context, tag string) error {
	archive, err := os.ReadFile(filepath.Join(n.cluster.options.Binaries.Images, "ip-masq-"+tag+".tar"))
	if err != nil {
		return fmt.Errorf("read image: %w (`make e2e-cluster` builds it and sets IPMASQ_IMAGE_DIR)", err)
	}
	return n.Runtime.Import(ctx, archive)
}

// ApplyDirectory runs kubectl apply -k with a directory of deploy/kustomize.
func (c *Cluster) ApplyDirectory(ctx context.Context, path string) error {
	_, err := c.Kubectl(ctx, "apply", "-k", kustomize(path))
	return err
}

// ApplyOverlay applies a kustomization with the text rest on top of directories of
// deploy/kustomize.
func (c *Cluster) ApplyOverlay(ctx context.Context, rest string, directories ...string) error {
	overlay, err := c.overlay(rest, directories...)
	if err != nil {
		return err
	}
	_, err = c.Kubectl(ctx, "apply", "-k", overlay)
	return err
}

// overlay writes a kustomization and returns its directory. kustomize accepts only relative paths;
// COMPONENTS/ in rest is replaced by that of the components.
func (c *Cluster) overlay(rest string, directories ...string) (string, error) {
	overlay, err := os.MkdirTemp(c.directory, "overlay-")
	if err != nil {
		return "", fmt.Errorf("make overlay: %w", err)
	}
	all, err := filepath.Abs(kustomize("."))
	if err == nil {
		all, err = filepath.Rel(overlay, all)
	}
	if err != nil {
		return "", fmt.Errorf("make overlay: %w", err)
	}
	text := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n"
	for _, directory := range directories {
		text += "- " + filepath.Join(all, directory) + "\n"
	}
	text += strings.ReplaceAll(rest, "COMPONENTS/", filepath.Join(all, "components")+"/")
	if err := os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), []byte(text), 0o644); err != nil {
		return "", fmt.Errorf("make overlay: %w", err)
	}
	return overlay, nil
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
func pack(image oci.Image) ([]byte, error) {
	image.Arch = runtime.GOARCH
	var archive bytes.Buffer
	if err := oci.Write(&archive, image); err != nil {
		return nil, fmt.Errorf("pack image %s: %w", image.Name, err)
	}
	return archive.Bytes(), nil
}
