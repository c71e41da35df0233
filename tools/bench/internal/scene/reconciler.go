// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Reconciler is ip-masq-reconciler in the background of a node.
type Reconciler struct {
	node    *Node
	command *topology.Cmd
	log     *os.File
	http    *http.Client
	kill    context.CancelFunc
}

const health = "127.0.0.1:19820"

// AgentDir is where the node's agent files are, once there is one.
func (n *Node) AgentDir() string { return filepath.Join(n.Dir, "agent") }

// AgentFile writes the agents' file as kubelet does, at once and whole.
func (n *Node) AgentFile(text string) error {
	next := filepath.Join(n.Dir, "next-agent-file")
	return errors.Join(os.MkdirAll(n.AgentDir(), 0o755), os.WriteFile(next, []byte(text), 0o644),
		os.Rename(next, filepath.Join(n.AgentDir(), "ip-masq-agent")))
}

// StartReconciler starts it and waits until the node is ready.
func (n *Node) StartReconciler(args ...string) (*Reconciler, error) {
	confDir := filepath.Join(n.Dir, "net.d")
	log, err := os.Create(filepath.Join(n.Dir, "log"))
	if err = errors.Join(err, os.MkdirAll(confDir, 0o755)); err != nil {
		return nil, err
	}
	all := []string{"run", "--data-dir", n.DataDir, "--cni-conf-dir", confDir, "--backend", n.Form.Backend, "--health-listen", health}
	if _, err := os.Stat(n.AgentDir()); err == nil {
		all = append(all, "--agent-config-dir", n.AgentDir())
	}
	ctx, kill := context.WithCancel(context.Background())
	r := &Reconciler{node: n, log: log, http: n.client(), kill: kill,
		command: n.Node.Command(ctx, filepath.Join(n.binaries, "ip-masq-reconciler"), append(all, args...)...)}
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

// client connects from within the node.
func (n *Node) client() *http.Client {
	dial := func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = n.Node.Do(func() error {
			var d net.Dialer
			c, err = d.DialContext(ctx, network, address)
			return err
		})
		return c, err
	}
	return &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DialContext: dial}}
}

func (r *Reconciler) awaitReady() error {
	const most = 20 * time.Second
	said := "nothing"
	for start := time.Now(); time.Since(start) < most; time.Sleep(10 * time.Millisecond) {
		answer, err := r.http.Get("http://" + health + "/readyz")
		if err != nil {
			continue
		}
		body, err := io.ReadAll(answer.Body)
		if err := errors.Join(err, answer.Body.Close()); err != nil {
			return err
		}
		if answer.StatusCode == http.StatusOK {
			r.http.CloseIdleConnections()
			return nil
		}
		said = string(body)
	}
	log, _ := os.ReadFile(r.log.Name()) // it may have told more
	return fmt.Errorf("reconciler not ready within %s: %s\n%s", most, said, log)
}

// Usage is what the process has used since it began, and what it has.
type Usage struct {
	CPU     time.Duration
	Memory  int64 // resident, in bytes
	Written int64 // to storage, in bytes
	Logged  int64 // bytes
}

// Usage reads it.
func (r *Reconciler) Usage() (Usage, error) {
	var u Usage
	dir := fmt.Sprintf("/proc/%d/", r.command.Process.Pid)
	threads, err := filepath.Glob(dir + "task/*/schedstat")
	if err != nil {
		return u, err
	}
	for _, path := range threads {
		text, err := os.ReadFile(path)
		if err != nil {
			return u, err
		}
		// Nanoseconds on a processor, nanoseconds waiting, time slices.
		ran, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
		if err != nil {
			return u, fmt.Errorf("%s: %w", path, err)
		}
		u.CPU += time.Duration(ran)
	}
	for _, want := range []struct {
		file, name string
		unit       int64
		to         *int64
	}{{"status", "VmRSS", 1 << 10, &u.Memory}, {"io", "write_bytes", 1, &u.Written}} {
		text, err := os.ReadFile(dir + want.file)
		if err != nil {
			return u, err
		}
		for line := range strings.Lines(string(text)) {
			if words := strings.Fields(line); len(words) > 1 && words[0] == want.name+":" {
				value, err := strconv.ParseInt(words[1], 10, 64)
				if err != nil {
					return u, fmt.Errorf("%s%s: %w", dir, want.file, err)
				}
				*want.to = value * want.unit
			}
		}
	}
	info, err := r.log.Stat()
	if err != nil {
		return u, err
	}
	u.Logged = info.Size()
	return u, nil
}

// Stop ends it by SIGTERM.
func (r *Reconciler) Stop() error {
	defer r.kill()
	err := r.command.Process.Signal(syscall.SIGTERM)
	return errors.Join(err, r.command.Wait(), r.log.Close())
}
