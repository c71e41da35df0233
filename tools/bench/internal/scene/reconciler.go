// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
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
func (n *Node) AgentDir() string { return filepath.Join(n.configured(), "agent") }

// confDir is the directory of conflists that the reconciler reads.
func (n *Node) confDir() string { return filepath.Join(n.configured(), "net.d") }

// configured is beside the node's own directory and not in it: the reconciler
// watches each directory on the way to the two, and would be told of all files
// that are made there for what plugins print.
func (n *Node) configured() string { return n.Dir + "-configured" }

// AgentFile writes the agents' file as kubelet does, at once and whole.
func (n *Node) AgentFile(text string) error {
	next := filepath.Join(n.Dir, "next-agent-file")
	return errors.Join(os.MkdirAll(n.AgentDir(), 0o755), os.WriteFile(next, []byte(text), 0o644),
		os.Rename(next, filepath.Join(n.AgentDir(), "ip-masq-agent")))
}

// StartReconciler starts it and waits until the node is ready.
func (n *Node) StartReconciler(args ...string) (*Reconciler, error) {
	log, err := os.Create(filepath.Join(n.Dir, "log"))
	if err = errors.Join(err, os.MkdirAll(n.confDir(), 0o755)); err != nil {
		return nil, err
	}
	all := []string{"run", "--data-dir", n.DataDir, "--cni-conf-dir", n.confDir(), "--backend", n.Form.Backend, "--health-listen", health}
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
	CPU    time.Duration
	Memory int64 // resident, in bytes
	Peak   int64 // the most that was resident, in bytes
	Logged int64 // bytes
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
	status, err := os.ReadFile(dir + "status")
	if err != nil {
		return u, err
	}
	if u.Memory, err = kibibytes(status, "VmRSS"); err != nil {
		return u, err
	}
	if u.Peak, err = kibibytes(status, "VmHWM"); err != nil {
		return u, err
	}
	info, err := r.log.Stat()
	if err != nil {
		return u, err
	}
	u.Logged = info.Size()
	return u, nil
}

// kibibytes returns a size of /proc/PID/status in bytes.
func kibibytes(status []byte, name string) (int64, error) {
	for line := range strings.Lines(string(status)) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == name+":" {
			size, err := strconv.ParseInt(words[1], 10, 64)
			return size << 10, err
		}
	}
	return 0, fmt.Errorf("the status of the reconciler has no %s", name)
}

// Stamps tell of each file and directory, by its path, which it is and when it
// or anything about it was changed.
type Stamps map[string]stamp

// stamp is of what stat(2) returns that which no write leaves as it was. The
// blocks that a process wrote would not do: those to a tmpfs are not counted.
type stamp struct {
	inode             uint64
	size              int64
	modified, changed syscall.Timespec
}

// Stamps are those of all that the reconciler may write: the node's state, the
// agents' files and the conflists. The attachments and the verification caches are left out,
// which are for ADD and DEL to write.
func (n *Node) Stamps() (Stamps, error) {
	stamps := Stamps{}
	for _, root := range []string{n.DataDir, n.AgentDir(), n.confDir()} {
		if err := filepath.WalkDir(root, stamps.take); err != nil && (root == n.DataDir || !errors.Is(err, fs.ErrNotExist)) {
			return nil, fmt.Errorf("look for what was written: %w", err)
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
		return nil // gone meanwhile, and so changed if it was there before
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

// Changed is how many files and directories are others now, or changed, or new,
// or gone.
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

// Stop ends it by SIGTERM.
func (r *Reconciler) Stop() error {
	defer r.kill()
	err := r.command.Process.Signal(syscall.SIGTERM)
	return errors.Join(err, r.command.Wait(), r.log.Close())
}
