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

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Reconciler is ip-masq-reconciler in the background of a node.
type Reconciler struct {
	node    *Node
	command *topology.Cmd
	log     *os.File
	kill    context.CancelFunc
}

const health = "127.0.0.1:19820"

// confDir returns the directory of conflists that the reconciler reads. It is outside Dir because the
// reconciler watches all parent directories, and Dir changes with each run of a plugin.
func (n *Node) confDir() string { return n.Dir + "-net.d" }

// StartReconciler starts the reconciler and waits until it is ready.
func (n *Node) StartReconciler(args ...string) (*Reconciler, error) {
	log, err := os.Create(filepath.Join(n.Dir, "log"))
	if err = errors.Join(err, os.MkdirAll(n.confDir(), 0o755)); err != nil {
		return nil, err
	}
	all := []string{"run", "--data-dir", n.DataDir, "--cni-conf-dir", n.confDir(), "--backend", n.Backend.Kind, "--health-listen", health}
	ctx, kill := context.WithCancel(context.Background())
	r := &Reconciler{node: n, log: log, kill: kill, command: n.Node.Command(ctx, filepath.Join(n.binaries, "ip-masq-reconciler"), append(all, args...)...)}
	r.command.Env = []string{"PATH=" + n.programs}
	r.command.Stdout, r.command.Stderr = log, log
	if err := r.command.Start(); err != nil {
		return nil, errors.Join(err, log.Close())
	}
	if err := r.awaitReady(); err != nil {
		return nil, errors.Join(err, r.Stop())
	}
	return r, nil
}

func (r *Reconciler) awaitReady() error {
	const most = 20 * time.Second
	var last string
	for start := time.Now(); time.Since(start) < most; time.Sleep(10 * time.Millisecond) {
		status, text, err := r.node.Node.HTTPGet(context.Background(), "http://"+health+"/readyz")
		if err == nil && status == http.StatusOK {
			return nil
		}
		last = fmt.Sprint(text, err)
	}
	log, _ := os.ReadFile(r.log.Name()) // the log can be empty
	return fmt.Errorf("reconciler not ready within %s: %s\n%s", most, last, log)
}

// CPUTime returns the processor time of the process since its start.
func (r *Reconciler) CPUTime() (time.Duration, error) { return r.command.CPUTime() }

// Stop stops the reconciler with SIGTERM.
func (r *Reconciler) Stop() error {
	defer r.kill()
	err := r.command.Process.Signal(syscall.SIGTERM)
	return errors.Join(err, r.command.Wait(), r.log.Close())
}
