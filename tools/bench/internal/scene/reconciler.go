// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

const health = "127.0.0.1:19820"

// confDir returns the directory of conflists that the reconciler reads. It is outside Dir because the
// reconciler watches all parent directories, and Dir changes with each run of a plugin.
func (n *Node) confDir() string { return n.Dir + "-net.d" }

// StartReconciler starts the reconciler until the node is closed, and waits until it is ready.
func (n *Node) StartReconciler(args ...string) *topology.Cmd {
	log := assert.Must(os.Create(filepath.Join(n.Dir, "log")))(n)
	assert.NoError(n, os.MkdirAll(n.confDir(), 0o755))
	all := []string{"run", "--data-dir", n.DataDir, "--cni-conf-dir", n.confDir(), "--backend", n.Backend.Kind, "--health-listen", health}
	ctx, kill := context.WithCancel(context.Background())
	c := n.Node.Command(ctx, filepath.Join(n.binaries, "ip-masq-reconciler"), append(all, args...)...)
	c.Env = []string{"PATH=" + n.programs}
	c.Stdout, c.Stderr = log, log
	assert.NoError(n, c.Start())
	n.Cleanup(func() {
		defer kill()
		assert.NoError(n, errors.Join(c.Process.Signal(syscall.SIGTERM), c.Wait(), log.Close()))
	})
	n.awaitReady(log.Name())
	return c
}

func (n *Node) awaitReady(log string) {
	const most = 20 * time.Second
	var last string
	for start := time.Now(); time.Since(start) < most; time.Sleep(10 * time.Millisecond) {
		status, text, err := n.Node.HTTPGet(context.Background(), "http://"+health+"/readyz")
		if err == nil && status == http.StatusOK {
			return
		}
		last = fmt.Sprint(text, err)
	}
	n.Fatalf("reconciler not ready within %s: %s\n%s", most, last, assert.Must(os.ReadFile(log))(n))
}
