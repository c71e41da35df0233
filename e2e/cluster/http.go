// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
)

// Readyz returns the status code and text of the reconciler's /readyz on the node.
func (n *Node) Readyz(ctx context.Context) (int, string, error) {
	return n.http(ctx, "http://127.0.0.1:19820/readyz")
}

// Metrics returns what the reconciler's /metrics on the node serves, with the component metrics of deploy/kustomize.
func (n *Node) Metrics(ctx context.Context) (string, error) {
	_, text, err := n.http(ctx, fmt.Sprintf("http://%s:19821/metrics", n.Address))
	return text, err
}

// http gets a URL from the node itself.
func (n *Node) http(ctx context.Context, url string) (int, string, error) {
	status, text, err := n.HTTPGet(ctx, url)
	if err != nil {
		return 0, "", fmt.Errorf("get %s on %s: %w", url, n.Name, err)
	}
	return status, text, nil
}
