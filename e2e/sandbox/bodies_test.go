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

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// bodyVariable names the function that a process started by a test runs instead of the tests.
const bodyVariable = "SANDBOX_TEST_BODY"

const ready = "ready"

// TestMain does not enter a sandbox: the tests observe sandboxes from outside and only read there.
func TestMain(m *testing.M) {
	bodies := map[string]func() error{
		"change": func() error { return topology.Run(change) },
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
func change(t topology.T) {
	assert.NoError(t, sandbox.Check())
	assert.Equal(t, "uid", os.Getuid(), 0)
	path := strings.Split(os.Getenv("PATH"), ":")
	if !slices.Contains(path, "/usr/sbin") || !slices.Contains(path, "/sbin") {
		t.Errorf("PATH lacks sbin: %q", path)
	}
	interfaces := assert.Must(net.Interfaces())(t)
	if len(interfaces) != 1 || interfaces[0].Flags&net.FlagUp == 0 {
		t.Errorf("want loopback alone, and up: %v", interfaces)
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: linkName}}
	assert.NoError(t, netlink.LinkAdd(bridge))
	assert.NoError(t, netlink.LinkSetUp(bridge))
	assert.NoError(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	for _, directory := range []string{"/run", "/var/run", "/etc/cni", "/etc/ip-masq", "/opt/cni", "/var/lib/cni"} {
		entries := assert.Must(os.ReadDir(directory))(t)
		if slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() != fileName }) {
			t.Errorf("%s is not empty at first: %v", directory, entries)
		}
		assert.NoError(t, os.WriteFile(directory+"/"+fileName, nil, 0o600))
	}
	for _, directory := range []string{"/etc", "/opt", "/var/lib"} {
		assert.NoError(t, os.WriteFile(directory+"/"+fileName, nil, 0o600))
	}
	assert.Must(os.Stat("/etc/passwd"))(t)
}

func wait() error {
	fmt.Println(ready)
	time.Sleep(time.Minute)
	return nil
}
