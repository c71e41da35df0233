// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// reconciler is a running reconciler on a node.
type reconciler struct {
	*machine.Daemon
	host *topology.Host
}

// health is its health address in the node's network.
const health = "127.0.0.1:19820"

// reconciler starts a reconciler with its own PATH, as in an image.
func (n *node) reconciler(t *testing.T, path string, args ...string) *reconciler {
	t.Helper()
	program := filepath.Join(topology.Must(topology.BinDir())(t), "ip-masq-reconciler")
	all := append([]string{"run", "--enable-ipv6", "--health-listen", health}, args...)
	d := topology.Must(n.StartDaemon("reconciler", []string{"PATH=" + path}, program, all...))(t)
	r := &reconciler{d, n.Host}
	until(t, 10*time.Second, "first sync", func() bool {
		code, _ := r.ready(t)
		return code != 0
	})
	return r
}

// ready asks /readyz; the code is 0 without an answer and before the first sync.
func (r *reconciler) ready(t *testing.T) (code int, body string) {
	t.Helper()
	code, body, err := r.host.HTTPGet(t.Context(), "http://"+health+"/readyz")
	if err != nil {
		return 0, err.Error()
	}
	return code, body
}
