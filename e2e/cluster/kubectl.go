// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Kubectl runs kubectl as an administrator on the control plane's host and returns its standard
// output. The error has its standard error.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.kubectl(ctx, "", args...)
}

// Apply runs kubectl apply with YAML or JSON documents.
func (c *Cluster) Apply(ctx context.Context, text string) error {
	_, err := c.kubectl(ctx, text, "apply", "-f", "-")
	return err
}

// Get decodes the output of kubectl get ARGS -o json.
func (c *Cluster) Get(ctx context.Context, into any, args ...string) error {
	text, err := c.Kubectl(ctx, append(append([]string{"get"}, args...), "-o", "json")...)
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(text), into); err != nil {
		return fmt.Errorf("decode kubectl get %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

func (c *Cluster) kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	cmd := c.control.Command(ctx, filepath.Join(c.options.Binaries.Kubernetes, "kubectl"), args...)
	cmd.Stdin = strings.NewReader(stdin)
	return c.asAdministrator(cmd)
}

// Shell runs commands of documents in a directory, as an administrator who has kubectl and helm.
func (c *Cluster) Shell(ctx context.Context, directory, script string) (string, error) {
	cmd := c.control.Command(ctx, "sh", "-exc", script)
	cmd.Dir = directory
	return c.asAdministrator(cmd)
}

func (c *Cluster) asAdministrator(cmd *topology.Cmd) (string, error) {
	b := c.options.Binaries
	path := strings.Join([]string{b.Kubernetes, filepath.Join(b.Own, "deploy"), os.Getenv("PATH")}, string(filepath.ListSeparator))
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.plane.admin, "HOME="+c.directory, "PATH="+path)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
