// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// reconciler is a running reconciler on a node.
type reconciler struct {
	*machine.Daemon
	http *http.Client
}

// health is its health address in the node's network.
const health = "127.0.0.1:19820"

// reconciler starts a reconciler with its own PATH, as in an image.
func (n *node) reconciler(t *testing.T, path string, args ...string) *reconciler {
	t.Helper()
	program := filepath.Join(topology.Must(topology.BinDir())(t), "ip-masq-reconciler")
	all := append([]string{"run", "--enable-ipv6", "--health-listen", health}, args...)
	d := topology.Must(n.StartDaemon("reconciler", []string{"PATH=" + path}, program, all...))(t)
	dial := func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = n.Do(func() error {
			var d net.Dialer
			c, err = d.DialContext(ctx, network, address)
			return err
		})
		return c, err
	}
	r := &reconciler{d, &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
	until(t, 10*time.Second, "first pass", func() bool {
		code, _ := r.ready(t)
		return code != 0
	})
	return r
}

// ready asks /readyz; the code is 0 without an answer and before the first sync.
func (r *reconciler) ready(t *testing.T) (code int, body string) {
	t.Helper()
	answer, err := r.http.Get("http://" + health + "/readyz")
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	must(t, err)
	return answer.StatusCode, string(text)
}
