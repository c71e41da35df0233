// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

// bodyVariable names the function that a process started by a test runs instead of the tests.
const bodyVariable = "SANDBOX_TEST_BODY"

const ready = "ready"

// TestMain does not enter a sandbox: the tests observe sandboxes from outside and only read there.
func TestMain(m *testing.M) {
	bodies := map[string]func() error{
		"change":          change,
		"change-and-wait": changeAndWait,
		"nested":          nested,
		"refused":         refused,
		"chroot":          inChroot,
		"wait":            wait,
		"await-term":      awaitTerm,
		"exit-7":          func() error { os.Exit(7); return nil },
		"abort":           func() error { return unix.Kill(os.Getpid(), unix.SIGKILL) },
	}
	switch name := os.Getenv(bodyVariable); name {
	case "":
		os.Exit(m.Run())
	case "tests":
		os.Exit(sandbox.Run(m))
	default:
		body := bodies[name]
		os.Exit(sandbox.Enter(func() int {
			if err := body(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			return 0
		}))
	}
}

// change makes the changes in the sandbox that must not be visible outside.
func change() error {
	if err := sandbox.Check(); err != nil {
		return err
	}
	if os.Getuid() != 0 {
		return fmt.Errorf("uid is %d, want 0", os.Getuid())
	}
	path := strings.Split(os.Getenv("PATH"), ":")
	if !slices.Contains(path, "/usr/sbin") || !slices.Contains(path, "/sbin") {
		return fmt.Errorf("PATH lacks sbin: %q", path)
	}
	interfaces, err := net.Interfaces()
	if err != nil {
		return err
	}
	if len(interfaces) != 1 || interfaces[0].Flags&net.FlagUp == 0 {
		return fmt.Errorf("want loopback alone, and up: %v", interfaces)
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: linkName}}
	if err := netlink.LinkAdd(bridge); err != nil {
		return fmt.Errorf("add bridge: %w", err)
	}
	if err := netlink.LinkSetUp(bridge); err != nil {
		return fmt.Errorf("set bridge up: %w", err)
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return err
	}
	for _, directory := range []string{"/run", "/var/run", "/etc/cni", "/etc/ip-masq", "/opt/cni", "/var/lib/cni"} {
		entries, err := os.ReadDir(directory)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() != fileName }) {
			return fmt.Errorf("%s is not empty at first: %v", directory, entries)
		}
		if err := os.WriteFile(directory+"/"+fileName, nil, 0o600); err != nil {
			return err
		}
	}
	for _, directory := range []string{"/etc", "/opt", "/var/lib"} {
		if err := os.WriteFile(directory+"/"+fileName, nil, 0o600); err != nil {
			return err
		}
	}
	_, err = os.Stat("/etc/passwd")
	return err
}

// nested starts a second process, which must be in the same sandbox.
func nested() error {
	here, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return err
	}
	if where := os.Getenv("SANDBOX_TEST_WHERE"); where != "" {
		if where != here {
			return fmt.Errorf("in %s, want %s", here, where)
		}
		return nil
	}
	command := exec.Command("/proc/self/exe")
	command.Env = append(os.Environ(), "SANDBOX_TEST_WHERE="+here)
	output, err := command.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, output)
	}
	return nil
}

// refused calls Enter on a simulated machine that allows no namespaces. It runs in a user
// namespace, whose limit it can lower without changing the machine.
func refused() error {
	users, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return err
	}
	if strings.Contains(string(users), "4294967295") {
		return errors.New("not in a user namespace of its own")
	}
	if err := os.WriteFile("/proc/sys/user/max_net_namespaces", []byte("0"), 0); err != nil {
		return err
	}
	command := exec.Command("/proc/self/exe")
	command.Env = append(os.Environ(), "IPMASQ_SANDBOX=", bodyVariable+"=exit-7")
	output, err := command.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		return fmt.Errorf("want exit code 1, got %w: %s", err, output)
	}
	for _, want := range []string{"sandbox: start in new namespaces", "needs root", "user.max_net_namespaces"} {
		if !strings.Contains(string(output), want) {
			return fmt.Errorf("message lacks %q: %s", want, output)
		}
	}
	return nil
}

// inChroot enters another sandbox in a directory that is not a mount point, on file systems with
// shared mounts, as systemd sets them up. Its mounts must not be visible outside.
func inChroot() error {
	const root = "/run/chroot"
	entries, err := os.ReadDir("/")
	if err != nil {
		return err
	}
	for _, e := range entries {
		within := filepath.Join(root, e.Name())
		if e.Type() == fs.ModeSymlink {
			target, err := os.Readlink("/" + e.Name())
			if err := errors.Join(err, os.MkdirAll(root, 0o755), os.Symlink(target, within)); err != nil {
				return err
			}
			continue
		}
		if !e.IsDir() {
			continue
		}
		if err := os.MkdirAll(within, 0o755); err != nil {
			return err
		}
		if e.Name() == "run" {
			continue
		}
		if err := unix.Mount("/"+e.Name(), within, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind /%s: %w", e.Name(), err)
		}
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return err
	}
	before, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	command := exec.Command("/proc/self/exe")
	command.Env = append(os.Environ(), "IPMASQ_SANDBOX=", bodyVariable+"=change-and-wait")
	command.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	command.Dir = "/usr"
	command.Stderr = os.Stderr
	in, err := command.StdinPipe()
	if err != nil {
		return err
	}
	out, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		return err
	}
	said, _ := bufio.NewReader(out).ReadString('\n')
	during, err := os.ReadFile("/proc/self/mountinfo")
	err = errors.Join(err, in.Close(), command.Wait())
	if want := "in /usr\n"; err == nil && said != want {
		err = fmt.Errorf("got output %q, want %q", said, want)
	}
	if err == nil && string(during) != string(before) {
		err = fmt.Errorf("mounts have changed:\n%s\nwere:\n%s", during, before)
	}
	return err
}

// changeAndWait calls change and waits until its input ends.
func changeAndWait() error {
	if err := change(); err != nil {
		return err
	}
	here, err := os.Getwd()
	if err != nil {
		return err
	}
	fmt.Println("in", here)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func wait() error {
	fmt.Println(ready)
	time.Sleep(time.Minute)
	return nil
}

func awaitTerm() error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGTERM)
	fmt.Println(ready)
	<-signals
	os.Exit(9)
	return nil
}
