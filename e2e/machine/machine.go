// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Machine is a host whose programs have their own file system and process table. The host's Command
// runs a program on it; Path maps its files into this process.
type Machine struct {
	*topology.Host
	// Cgroup is the path, in every hierarchy, of the cgroup in which runtimes put containers. It is
	// removed with the machine.
	Cgroup string

	init    *topology.Cmd
	dir     string // of logs
	cgroups []string

	mu      sync.Mutex
	daemons []*Daemon
	close   func() error
}

// Own returns the directories of which each machine has its own, in memory.
func Own() []string {
	return []string{
		"/run",
		"/etc/cni", "/etc/containerd", "/etc/containers", "/etc/ip-masq", "/etc/kubernetes",
		"/opt/cni", "/opt/containerd",
		"/var/lib/cni", "/var/lib/containerd", "/var/lib/containers", "/var/lib/etcd", "/var/lib/kubelet",
		"/var/log",
	}
}

// New makes a machine of a host, with further directories of its own. All programs of the host
// run on the machine until the test's end. New can be called once for a host. If the test has failed,
// it logs the ends of the daemons' logs.
func New(t topology.T, host *topology.Host, further ...string) *Machine {
	t.Helper()
	m := &Machine{Host: host, dir: filepath.Join("/run/machines", filepath.Base(host.Path))}
	m.close = sync.OnceValue(m.dismantle)
	t.Cleanup(func() {
		if t, ok := t.(interface {
			Failed() bool
			Logf(format string, args ...any)
		}); ok && t.Failed() {
			for _, d := range m.Daemons() {
				t.Logf("%s of %s said at last:\n%s", d.Name, m.Name, tail(d.Output(), 4<<10))
			}
		}
		assert.NoError(t, m.Close())
	})
	assert.NoError(t, os.MkdirAll(m.dir, 0o755))
	m.makeCgroups(t)
	assert.NoError(t, m.Enclose(func() error { return m.separate(append(Own(), further...)) }))
	// A new PID namespace needs its own mount of /proc. mount(8) writes to /run, which must be
	// empty.
	m.run(t, "sh", "-c", "mount -t proc proc /proc && rm -rf /run/mount")
	return m
}

// source is the source of the machine's mounts in mountinfo.
const source = "ip-masq-machine"

// separate moves its thread into new namespaces.
func (m *Machine) separate(own []string) error {
	// A thread that shares its root and working directory cannot enter a mount namespace
	// (setns(2)).
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS | unix.CLONE_NEWUTS); err != nil {
		return fmt.Errorf("make mount and UTS namespace: %w", err)
	}
	if err := unix.Sethostname([]byte(m.Name)); err != nil {
		return fmt.Errorf("set hostname: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	for _, path := range own {
		if err := mountOwn(path); err != nil {
			return err
		}
	}
	if info, err := os.Lstat("/var/run"); err == nil && info.IsDir() {
		if err := unix.Mount("/run", "/var/run", "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind /run to /var/run: %w", err)
		}
	}
	// systemd makes mounts shared, and kubelets and runtimes require it. Nothing propagates
	// outside.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("make mounts shared: %w", err)
	}
	return m.startInit()
}

func mountOwn(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	if err := unix.Mount(source, path, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", path, err)
	}
	return nil
}

// startInit starts process 1 of a new PID namespace and moves its thread there.
func (m *Machine) startInit() error {
	// A shell that waits for a child also reaps orphans. Signals from its own namespace do not
	// reach it.
	c := exec.Command("sh", "-c", "while :; do sleep 1000; done")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, Pdeathsig: unix.SIGKILL}
	c.Dir = "/"
	if err := c.Start(); err != nil {
		return fmt.Errorf("make pid namespace: %w", err)
	}
	m.init = &topology.Cmd{Cmd: c}
	handle, err := unix.PidfdOpen(c.Process.Pid, 0)
	if err != nil {
		return fmt.Errorf("open process 1: %w", err)
	}
	defer func() { _ = unix.Close(handle) }()
	if err := unix.Setns(handle, unix.CLONE_NEWPID); err != nil {
		return fmt.Errorf("enter pid namespace: %w", err)
	}
	return nil
}

// Pid returns the PID of the machine's process 1, outside of the machine.
func (m *Machine) Pid() int { return m.init.Process.Pid }

// Path returns the path of a machine's file in this process. It does not work for absolute symbolic
// links.
func (m *Machine) Path(path string) string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", m.Pid()), path)
}

// WriteFile writes a file of the machine atomically and creates its parent directories.
func (m *Machine) WriteFile(path, text string, mode fs.FileMode) error {
	where := m.Path(path)
	if err := os.MkdirAll(filepath.Dir(where), 0o755); err != nil {
		return err
	}
	whole := filepath.Join(filepath.Dir(where), "."+filepath.Base(where)+".part")
	if err := os.WriteFile(whole, []byte(text), mode); err != nil {
		return err
	}
	return os.Rename(whole, where)
}

// Install copies a program to a path of the machine, atomically.
func (m *Machine) Install(program, path string) error {
	text, err := os.ReadFile(program)
	if err != nil {
		return fmt.Errorf("install %s: %w", path, err)
	}
	return m.WriteFile(path, string(text), 0o755)
}

// Close ends every program of the machine and removes its directories. Closing again does nothing.
// The host stays but can run no more programs.
func (m *Machine) Close() error { return m.close() }

func (m *Machine) dismantle() error {
	var errs []error
	if m.init != nil {
		errs = append(errs, m.init.Process.Kill())
		_ = m.init.Wait() // the error is that it was killed
	}
	for _, d := range m.Daemons() {
		<-d.Done()
	}
	errs = append(errs, m.removeCgroups(), os.RemoveAll(m.dir))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close machine %s: %w", m.Name, err)
	}
	return nil
}

// run runs a program and fails with its output.
func (m *Machine) run(t topology.T, program string, args ...string) {
	t.Helper()
	assert.Output(t, m.Command(context.Background(), program, args...))
}

func tail(text string, size int) string {
	if len(text) <= size {
		return text
	}
	return "…" + text[len(text)-size:]
}
