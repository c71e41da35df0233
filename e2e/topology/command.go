// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Cmd is an exec.Cmd whose program runs on a host. It is killed when ctx ends,
// when the host is closed, and when this process dies.
type Cmd struct {
	*exec.Cmd
	host *Host
}

// Command prepares a program to run on the host. The name is looked up as
// exec.Command does; the file system is that of this process.
func (h *Host) Command(ctx context.Context, name string, args ...string) *Cmd {
	c := exec.CommandContext(ctx, name, args...)
	c.SysProcAttr = &syscall.SysProcAttr{}
	if !h.enclosed.Load() {
		c.SysProcAttr.Pdeathsig = unix.SIGKILL
	}
	// Child processes of the program can keep its output open.
	c.WaitDelay = 5 * time.Second
	return &Cmd{Cmd: c, host: h}
}

// Enclose runs enter on the thread that starts the host's programs. It may move
// the thread to other namespaces of any kind but network and user; Command starts
// programs there from then on.
//
// In another pid namespace programs get no parent death signal, as os/exec compares
// getppid and takes the signal for sent. There enter must make sure that they end.
func (h *Host) Enclose(enter func() error) error {
	return h.thread.do(func() error {
		if err := enter(); err != nil {
			return err
		}
		// Without a /proc mounted by enter the pid namespace counts as another one.
		children, _ := os.Readlink("/proc/thread-self/ns/pid_for_children")
		own, _ := os.Readlink("/proc/thread-self/ns/pid")
		h.enclosed.Store(children == "" || children != own)
		return nil
	})
}

// Start is exec.Cmd's: a program inherits the namespace of the thread that
// starts it.
func (c *Cmd) Start() error {
	return c.host.thread.do(c.Cmd.Start)
}

// Run is exec.Cmd's.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output is exec.Cmd's; the ExitError has the whole standard error.
func (c *Cmd) Output() ([]byte, error) {
	if c.Stdout != nil {
		return nil, errors.New("read output: Stdout is already set")
	}
	var stdout, stderr bytes.Buffer
	c.Stdout = &stdout
	if c.Stderr == nil {
		c.Stderr = &stderr
	}
	err := c.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		exit.Stderr = stderr.Bytes()
	}
	return stdout.Bytes(), err
}

// CombinedOutput is exec.Cmd's.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	if c.Stdout != nil || c.Stderr != nil {
		return nil, errors.New("read output: Stdout or Stderr is already set")
	}
	var output bytes.Buffer
	c.Stdout, c.Stderr = &output, &output
	err := c.Run()
	return output.Bytes(), err
}

// CPUTime returns the processor time that the started program has taken so far.
func (c *Cmd) CPUTime() (time.Duration, error) {
	var cpu unix.Timespec
	err := unix.ClockGettime(int32(^c.Process.Pid<<3|2), &cpu) // clock_getcpuclockid(3)
	return time.Duration(cpu.Nano()), err
}

// Memory returns the resident memory of the started program in bytes, and its peak: VmRSS and VmHWM in
// proc_pid_status(5).
func (c *Cmd) Memory() (resident, peak int64, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.Process.Pid))
	if err != nil {
		return 0, 0, err
	}
	sizes := map[string]int64{}
	for line := range strings.Lines(string(status)) {
		if words := strings.Fields(line); len(words) == 3 && words[2] == "kB" {
			kibibytes, err := strconv.ParseInt(words[1], 10, 64)
			if err != nil {
				return 0, 0, err
			}
			sizes[words[0]] = kibibytes << 10
		}
	}
	if resident, peak = sizes["VmRSS:"], sizes["VmHWM:"]; resident == 0 || peak == 0 {
		return 0, 0, fmt.Errorf("process %d has no sizes of memory", c.Process.Pid)
	}
	return resident, peak, nil
}
