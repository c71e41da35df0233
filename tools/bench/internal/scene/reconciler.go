// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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

// AgentDir returns the directory of the node's agent files.
func (n *Node) AgentDir() string { return filepath.Join(n.configured(), "agent") }

// confDir returns the directory of conflists that the reconciler reads.
func (n *Node) confDir() string { return filepath.Join(n.configured(), "net.d") }

// configured returns the parent of AgentDir and confDir. It is outside Dir because the reconciler
// watches all parent directories, and Dir changes with each run of a plugin.
func (n *Node) configured() string { return n.Dir + "-configured" }

// AgentFile replaces the agent file atomically, as kubelet does.
func (n *Node) AgentFile(text string) error {
	next := filepath.Join(n.Dir, "next-agent-file")
	return errors.Join(os.MkdirAll(n.AgentDir(), 0o755), os.WriteFile(next, []byte(text), 0o644),
		os.Rename(next, filepath.Join(n.AgentDir(), "ip-masq-agent")))
}

// StartReconciler starts the reconciler and waits until it is ready.
func (n *Node) StartReconciler(args ...string) (*Reconciler, error) {
	log, err := os.Create(filepath.Join(n.Dir, "log"))
	if err = errors.Join(err, os.MkdirAll(n.confDir(), 0o755)); err != nil {
		return nil, err
	}
	all := []string{"run", "--data-dir", n.DataDir, "--cni-conf-dir", n.confDir(), "--backend", n.Backend.Kind, "--health-listen", health}
	if _, err := os.Stat(n.AgentDir()); err == nil {
		all = append(all, "--agent-config-dir", n.AgentDir())
	}
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

// Usage is the resource usage of the process since its start.
type Usage struct {
	CPU    time.Duration
	Memory int64 // resident, in bytes
	Peak   int64 // maximum of Memory
	Logged int64 // bytes
}

// Usage reads the usage.
func (r *Reconciler) Usage() (u Usage, err error) {
	if u.CPU, err = r.command.CPUTime(); err != nil {
		return u, err
	}
	if u.Memory, u.Peak, err = r.command.Memory(); err != nil {
		return u, err
	}
	info, err := r.log.Stat()
	if err != nil {
		return u, err
	}
	u.Logged = info.Size()
	return u, nil
}

// Stamps has the stamp of each file and directory, by path.
type Stamps map[string]stamp

// stamp has the fields of stat(2) that every write changes. The number of blocks that a process
// writes is not sufficient: the kernel does not count those of a tmpfs.
type stamp struct {
	inode             uint64
	size              int64
	modified, changed syscall.Timespec
}

// Stamps returns the stamps of all files that the reconciler may write: the state, the agent files
// and the conflists, without attachments and verification caches, which ADD and DEL write.
func (n *Node) Stamps() (Stamps, error) {
	stamps := Stamps{}
	for _, root := range []string{n.DataDir, n.AgentDir(), n.confDir()} {
		if err := filepath.WalkDir(root, stamps.take); err != nil && (root == n.DataDir || !errors.Is(err, fs.ErrNotExist)) {
			return nil, fmt.Errorf("read file stamps: %w", err)
		}
	}
	return stamps, nil
}

func (s Stamps) take(path string, e fs.DirEntry, err error) error {
	switch {
	case err != nil:
		return err
	case e.IsDir() && e.Name() == "attachments":
		return fs.SkipDir
	case filepath.Ext(path) == ".verified":
		return nil
	}
	info, err := e.Info()
	if errors.Is(err, fs.ErrNotExist) {
		return nil // deleted during the walk
	}
	if err != nil {
		return err
	}
	as, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s: stat has no inode", path)
	}
	s[path] = stamp{as.Ino, as.Size, as.Mtim, as.Ctim}
	return nil
}

// Changed returns the number of files and directories that were changed, replaced, created or
// deleted.
func (s Stamps) Changed(now Stamps) (count int) {
	for path, was := range s {
		if is, there := now[path]; !there || is != was {
			count++
		}
	}
	for path := range now {
		if _, there := s[path]; !there {
			count++
		}
	}
	return count
}

// Stop stops the reconciler with SIGTERM.
func (r *Reconciler) Stop() error {
	defer r.kill()
	err := r.command.Process.Signal(syscall.SIGTERM)
	return errors.Join(err, r.command.Wait(), r.log.Close())
}
