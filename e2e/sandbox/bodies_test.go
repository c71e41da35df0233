// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
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
		"change": change,
		"wait":   wait,
		"exit-7": func() error { os.Exit(7); return nil },
		"abort":  func() error { return unix.Kill(os.Getpid(), unix.SIGKILL) },
	}
	switch name := os.Getenv(bodyVariable); name {
	case "":
		os.Exit(m.Run())
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

func wait() error {
	fmt.Println(ready)
	time.Sleep(time.Minute)
	return nil
}
