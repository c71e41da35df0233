// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// reexec runs this program again with the same arguments in new namespaces and returns its exit
// code.
func reexec() (int, error) {
	outside, err := networkNamespace()
	if err != nil {
		return 0, err
	}
	attributes, err := namespaces()
	if err != nil {
		return 0, err
	}

	program, err := os.Executable()
	if err != nil || unix.Access(program, unix.X_OK) != nil {
		program = "/proc/self/exe" // in a chroot it does not give the child its path
	}
	child := exec.Command(program, os.Args[1:]...)
	child.Args[0] = os.Args[0]
	child.Env = append(os.Environ(), variable+"="+entering+outside)
	child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr
	child.SysProcAttr = attributes

	// Register first, so that no signal is lost.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2)
	defer signal.Stop(signals)

	// The kernel sends the parent death signal when the *thread* that forked
	// ends (prctl(2)), so that thread has to stay until the child is gone.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := child.Start(); err != nil {
		return 0, fmt.Errorf("start in new namespaces: %w%s", err, advice(err))
	}
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			select {
			case s := <-signals:
				// Signal fails only if the child has just ended; Wait below returns the result.
				_ = child.Process.Signal(s)
			case <-done:
				return
			}
		}
	}()
	return exitCode(child.Wait())
}

func exitCode(err error) (int, error) {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return 0, err
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		fmt.Fprintf(os.Stderr, "sandbox: ended by signal: %v\n", status.Signal())
		return 128 + int(status.Signal()), nil
	}
	return exit.ExitCode(), nil
}

// namespaces returns the namespaces of the child: network and mount, and a user namespace if this
// process may not create those itself.
func namespaces() (*syscall.SysProcAttr, error) {
	attributes := &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		Pdeathsig:  unix.SIGKILL,
	}
	able, err := capable(unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN, unix.CAP_NET_RAW)
	if err != nil || able {
		return attributes, err
	}
	attributes.Cloneflags |= unix.CLONE_NEWUSER
	attributes.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
	attributes.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	return attributes, nil
}

// capable reports whether this process has all the capabilities. Root in a container usually lacks
// some.
func capable(capabilities ...int) (bool, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false, fmt.Errorf("read capabilities: %w", err)
	}
	for _, c := range capabilities {
		if data[c/32].Effective&(1<<(c%32)) == 0 {
			return false, nil
		}
	}
	return true, nil
}

// advice returns the remedy for an error that means missing privileges.
func advice(err error) string {
	for _, refusal := range []error{unix.EPERM, unix.EACCES, unix.ENOSPC, unix.EUSERS} {
		if errors.Is(err, refusal) {
			return " (the sandbox needs root, or unprivileged user namespaces: see the sysctls" +
				" user.max_user_namespaces, user.max_net_namespaces, kernel.unprivileged_userns_clone" +
				" and kernel.apparmor_restrict_unprivileged_userns; in a container also its seccomp profile; in a chroot there are none)"
		}
	}
	return ""
}
