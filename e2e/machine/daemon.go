// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Daemon is a program that runs in the background.
type Daemon struct {
	Name string
	// Log is the file with the standard output and error of all daemons of this name on the
	// machine. It is a path of this process, not of the machine.
	Log string

	command *topology.Cmd
	done    chan struct{}
	err     error
}

// StartDaemon starts a program of the machine in the background. env is added to
// this process's environment.
func (m *Machine) StartDaemon(name string, env []string, program string, args ...string) (*Daemon, error) {
	d := &Daemon{Name: name, Log: filepath.Join(m.dir, name+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(d.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("start %s on %s: %w", name, m.Name, err)
	}
	defer func() { _ = log.Close() }()
	d.command = m.Command(context.Background(), program, args...)
	d.command.Env = append(os.Environ(), env...)
	d.command.Dir = "/"
	d.command.Stdout, d.command.Stderr = log, log
	if err := d.command.Start(); err != nil {
		return nil, fmt.Errorf("start %s on %s: %w", name, m.Name, err)
	}
	go func() {
		defer close(d.done)
		d.err = d.command.Wait()
	}()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.daemons = append(slices.DeleteFunc(m.daemons, func(old *Daemon) bool { return old.Log == d.Log }), d)
	return d, nil
}

// Daemons returns the latest daemon of each name, in the order of their starts.
func (m *Machine) Daemons() []*Daemon {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.daemons)
}

// Pid returns the PID outside of the machine.
func (d *Daemon) Pid() int { return d.command.Process.Pid }

// Done is closed once the daemon has ended.
func (d *Daemon) Done() <-chan struct{} { return d.done }

// Err waits for the daemon's end and returns its error: nil for exit code 0, else an
// *exec.ExitError.
func (d *Daemon) Err() error {
	<-d.done
	return d.err
}

// Signal sends a signal to the daemon but not to its child processes.
func (d *Daemon) Signal(s os.Signal) error { return d.command.Process.Signal(s) }

// Stop asks the daemon to end and waits. A daemon that has not ended in time is killed, which is an
// error. An ended daemon is no error. Child processes keep running.
func (d *Daemon) Stop(within time.Duration) error {
	if d.ended() {
		return nil
	}
	if err := d.Signal(unix.SIGTERM); err != nil && !d.ended() {
		return fmt.Errorf("stop %s: %w", d.Name, err)
	}
	for began := time.Now(); !timelimit.Exceeded(time.Since(began), within); {
		select {
		case <-d.done:
			return nil
		case <-time.After(within):
		}
	}
	if err := d.Kill(); err != nil {
		return err
	}
	return fmt.Errorf("stop %s: killed after %s", d.Name, within)
}

// Kill ends the daemon with SIGKILL and waits. Child processes keep running.
func (d *Daemon) Kill() error {
	if err := d.Signal(unix.SIGKILL); err != nil && !d.ended() {
		return fmt.Errorf("kill %s: %w", d.Name, err)
	}
	<-d.done
	return nil
}

func (d *Daemon) ended() bool {
	select {
	case <-d.done:
		return true
	default:
		return false
	}
}

// Output returns the content of the log, or the error that reading it gave.
func (d *Daemon) Output() string {
	text, err := os.ReadFile(d.Log)
	if err != nil {
		return err.Error()
	}
	return string(text)
}
