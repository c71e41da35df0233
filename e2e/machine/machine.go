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

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Machine is a host whose programs have a file system and a process table of
// their own. Command, of the host, runs a program there; a test that wants to see
// files there goes by Path.
type Machine struct {
	*topology.Host
	// Cgroup is the path, in every hierarchy, of a cgroup that goes with the
	// machine: where runtimes are to put containers.
	Cgroup string

	init    *topology.Cmd
	dir     string // of logs
	cgroups []string

	mu      sync.Mutex
	daemons []*Daemon
	close   func() error
}

// Own are the directories that are a machine's own. They are of memory.
func Own() []string {
	return []string{
		"/run",
		"/etc/cni", "/etc/containerd", "/etc/containers", "/etc/ip-masq", "/etc/kubernetes",
		"/opt/cni", "/opt/containerd",
		"/var/lib/cni", "/var/lib/containerd", "/var/lib/containers", "/var/lib/etcd", "/var/lib/kubelet",
		"/var/log",
	}
}

// Start makes a machine of a host, with further directories of its own. From then
// on all programs of the host run on it. A host can be made a machine once.
func Start(host *topology.Host, further ...string) (*Machine, error) {
	m := &Machine{Host: host, dir: filepath.Join("/run/machines", filepath.Base(host.Path))}
	m.close = sync.OnceValue(m.dismantle)
	if err := m.build(append(Own(), further...)); err != nil {
		return nil, errors.Join(fmt.Errorf("make machine %s: %w", host.Name, err), m.Close())
	}
	return m, nil
}

// New is Start for a test, and Close at its end. If the test has failed by then,
// the ends of the daemons' logs are shown.
func New(t topology.T, host *topology.Host, further ...string) *Machine {
	t.Helper()
	m := topology.Must(Start(host, further...))(t)
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
	// With the pid namespace comes its /proc, which who lives there must mount.
	// mount(8) keeps notes in /run, which is to be empty.
	return run(m.Command(context.Background(), "sh", "-c", "mount -t proc proc /proc && rm -rf /run/mount"))
}

// source is what mountinfo shows as the source of the machine's directories.
const source = "ip-masq-machine"

// separate leads its thread into new namespaces.
func (m *Machine) separate(own []string) error {
	// Without a root and working directory of its own a thread cannot have
	// mounts of its own either (setns(2)).
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make mount namespace: %w", err)
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
	// As systemd has it, and as kubelets and runtimes want it; nothing gets out.
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

// startInit starts process 1 of a new pid namespace and leads its thread there.
func (m *Machine) startInit() error {
	// A shell that waits for a child collects those that others have left, too.
	// It never ends by itself: signals from its own namespace do not reach it.
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

// Pid is the process number of the machine's process 1, outside of it.
func (m *Machine) Pid() int { return m.init.Process.Pid }

// Path is where a path of the machine is in this process's file system.
// A symbolic link to an absolute path leads astray there.
func (m *Machine) Path(path string) string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", m.Pid()), path)
}

// WriteFile writes a file of the machine and makes the directories above it. The
// file appears by a rename within its directory, complete.
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

// Install copies a program to a path of the machine, with a rename as WriteFile.
func (m *Machine) Install(program, path string) error {
	text, err := os.ReadFile(program)
	if err != nil {
		return fmt.Errorf("install %s: %w", path, err)
	}
	return m.WriteFile(path, string(text), 0o755)
}

// Close ends every program of the machine and removes what it has. To close it
// again does nothing. The host stays, and runs no more programs.
func (m *Machine) Close() error { return m.close() }

func (m *Machine) dismantle() error {
	var errs []error
	if m.init != nil {
		errs = append(errs, m.init.Process.Kill())
		_ = m.init.Wait() // says that it was killed
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

// run runs a command whose output matters only if it fails.
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
