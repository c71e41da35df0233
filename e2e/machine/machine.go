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
	"strings"
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

// Start makes a machine of a host, with further directories of its own. All programs of the host
// run on the machine from then on. Start can be called once for a host.
func Start(host *topology.Host, further ...string) (*Machine, error) {
	m := &Machine{Host: host, dir: filepath.Join("/run/machines", filepath.Base(host.Path))}
	m.close = sync.OnceValue(m.dismantle)
	if err := m.build(append(Own(), further...)); err != nil {
		return nil, errors.Join(fmt.Errorf("make machine %s: %w", host.Name, err), m.Close())
	}
	return m, nil
}

// New calls Start for a test and Close at its end. If the test has failed, it logs the ends of the
// daemons' logs.
func New(t topology.T, host *topology.Host, further ...string) *Machine {
	t.Helper()
	m := assert.Must(Start(host, further...))(t)
	t.Cleanup(func() {
		if t, ok := t.(interface {
			Failed() bool
			Logf(format string, args ...any)
		}); ok && t.Failed() {
			for _, d := range m.Daemons() {
				t.Logf("%s of %s said at last:\n%s", d.Name, m.Name, tail(d.Output(), 4<<10))
			}
		}
		if err := m.Close(); err != nil {
			t.Fatalf("%v", err)
		}
	})
	return m
}

func (m *Machine) build(own []string) error {
	if err := os.MkdirAll(m.dir, 0o755); err != nil {
		return err
	}
	if err := m.makeCgroups(); err != nil {
		return err
	}
	if err := m.Enclose(func() error { return m.separate(own) }); err != nil {
		return err
	}
	// A new PID namespace needs its own mount of /proc. mount(8) writes to /run, which must be
	// empty.
	return run(m.Command(context.Background(), "sh", "-c", "mount -t proc proc /proc && rm -rf /run/mount"))
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

// run runs a command and returns its output in the error if it fails.
func run(c *topology.Cmd) error {
	output, err := c.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, output)
	}
	return nil
}

func tail(text string, size int) string {
	if len(text) <= size {
		return text
	}
	return "…" + text[len(text)-size:]
}
