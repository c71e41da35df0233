// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// kustomize is the directory of deploy/kustomize.
func kustomize(path string) string { return filepath.Join("../../deploy/kustomize", path) }

// ImportProject gives every node the project's image of a tag: the archive
// ip-masq-TAG.tar of Binaries.Images.
func (c *Cluster) ImportProject(ctx context.Context, tag string) error {
	for _, n := range c.Nodes {
		if err := n.ImportProject(ctx, tag); err != nil {
			return err
		}
	}
	return nil
}

// ImportProject gives the node the project's image of a tag.
func (n *Node) ImportProject(ctx context.Context, tag string) error {
	archive, err := os.ReadFile(filepath.Join(n.cluster.options.Binaries.Images, "ip-masq-"+tag+".tar"))
	if err != nil {
		return fmt.Errorf("read image: %w (`make e2e-cluster` builds it and sets IPMASQ_IMAGE_DIR)", err)
	}
	return n.Runtime.Import(ctx, archive)
}

// ApplyDirectory is kubectl apply -k of a directory of deploy/kustomize.
func (c *Cluster) ApplyDirectory(ctx context.Context, path string) error {
	_, err := c.Kubectl(ctx, "apply", "-k", kustomize(path))
	return err
}

// ApplyOverlay applies a kustomization of a test's own: what rest says, on top of
// directories of deploy/kustomize.
func (c *Cluster) ApplyOverlay(ctx context.Context, rest string, directories ...string) error {
	overlay, err := c.overlay(rest, directories...)
	if err != nil {
		return err
	}
	_, err = c.Kubectl(ctx, "apply", "-k", overlay)
	return err
}

// overlay writes a kustomization and returns its directory. kustomize takes
// relative paths only; COMPONENTS/ in rest stands for the one to the components.
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

// DeleteDirectory is kubectl delete -k, and waits until the pods are gone.
func (c *Cluster) DeleteDirectory(ctx context.Context, path string) error {
	_, err := c.Kubectl(ctx, "delete", "-k", kustomize(path), "--ignore-not-found", "--cascade=foreground", "--timeout="+Patience.String())
	return err
}

// AwaitRollout waits until every pod of a DaemonSet in kube-system is of its
// latest template, and ready.
func (c *Cluster) AwaitRollout(ctx context.Context, daemonSet string) error {
	_, err := c.Kubectl(ctx, "rollout", "status", "-n", "kube-system", "daemonset/"+daemonSet, "--timeout="+Patience.String())
	return err
}

// Logs are what all containers of a DaemonSet's pods in kube-system have said; why
// they cannot be had is told in their place.
func (c *Cluster) Logs(ctx context.Context, daemonSet string) string {
	logs, err := c.Kubectl(ctx, "logs", "-n", "kube-system", "daemonset/"+daemonSet, "--all-pods", "--all-containers", "--prefix", "--tail=40", "--ignore-errors")
	if err != nil {
		logs += err.Error()
	}
	return logs
}
