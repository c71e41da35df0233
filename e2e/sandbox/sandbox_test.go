// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// Names that exist on no machine.
const (
	linkName = "imsandbox-test0"
	fileName = "ip-masq-sandbox-test"
)

// nobody is the unprivileged user of most distributions.
const nobody = 65534

// users returns the users as which the tests start a sandbox: root and nobody if root runs them,
// else the current user.
func users() map[string]*syscall.Credential {
	if os.Getuid() != 0 {
		return map[string]*syscall.Credential{"user": nil}
	}
	return map[string]*syscall.Credential{"root": nil, "nobody": {Uid: nobody, Gid: nobody}}
}

// command runs this test binary with another body.
func command(t *testing.T, body string, user *syscall.Credential, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := timelimit.Context(context.Background())
	t.Cleanup(cancel)
	c := exec.CommandContext(ctx, "/proc/self/exe", args...)
	c.Args[0] = os.Args[0]
	c.Dir = "/"
	c.Env = append(os.Environ(), bodyVariable+"="+body)
	c.SysProcAttr = &syscall.SysProcAttr{Credential: user}
	return c
}

func run(t *testing.T, body string, user *syscall.Credential, args ...string) (output string, code int) {
	t.Helper()
	c := command(t, body, user, args...)
	text, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(text), c.ProcessState.ExitCode()
}

func TestNothingIsSeenOutside(t *testing.T) {
	for name, user := range users() {
		t.Run(name, func(t *testing.T) {
			before := outside(t)
			if output, code := run(t, "change", user); code != 0 {
				t.Fatalf("exit code %d: %s", code, output)
			}
			assert.Equal(t, "the machine", outside(t), before)
		})
	}
}

// outside reports which effects of the change body are visible in this process.
func outside(t *testing.T) map[string]bool {
	t.Helper()
	seen := map[string]bool{}
	_, err := net.InterfaceByName(linkName)
	seen["link"] = err == nil
	for _, d := range []string{"/run", "/etc", "/opt", "/var/lib", "/etc/cni", "/etc/ip-masq", "/opt/cni", "/var/lib/cni"} {
		for _, path := range []string{d, filepath.Join(d, fileName)} {
			_, err := os.Lstat(path)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
			seen[path] = err == nil
		}
	}
	mounts := assert.Must(os.ReadFile("/proc/self/mountinfo"))(t)
	seen["mounts"] = strings.Contains(string(mounts), "ip-masq-sandbox")
	forward := assert.Must(os.ReadFile("/proc/sys/net/ipv4/ip_forward"))(t)
	seen["forwarding"] = string(bytes.TrimSpace(forward)) == "1"
	return seen
}

// TestCheckOutside runs outside of a sandbox; each body checks the inside.
func TestCheckOutside(t *testing.T) {
	assert.ErrorContains(t, sandbox.Check(), "sandbox.Run")
}

func TestTheInsideDiesWithTheOutside(t *testing.T) {
	for name, user := range users() {
		t.Run(name, func(t *testing.T) {
			c := command(t, "wait", user)
			rest := started(t, c)
			assert.NoError(t, c.Process.Kill())
			// The file ends once no process has the pipe open for writing, including the one
			// inside. The command's context kills only the process outside.
			assert.NoError(t, rest.SetReadDeadline(time.Now().Add(timelimit.Wait)))
			if _, err := io.ReadAll(rest); err != nil {
				t.Errorf("the process inside lives on: %v", err)
			}
			_ = c.Wait()
		})
	}
}

// started starts c, waits until its body is ready, and returns its output.
func started(t *testing.T, c *exec.Cmd) *os.File {
	t.Helper()
	reader, writer, err := os.Pipe()
	assert.NoError(t, err)
	t.Cleanup(func() { _ = reader.Close() })
	c.Stdout, c.Stderr = writer, os.Stderr
	assert.NoError(t, c.Start())
	assert.NoError(t, writer.Close())
	line, err := bufio.NewReader(reader).ReadString('\n')
	if err != nil || strings.TrimSpace(line) != ready {
		t.Fatalf("the body said %q, %v; want %q", line, err, ready)
	}
	return reader
}
