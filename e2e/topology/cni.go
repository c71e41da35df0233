// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// BinDir returns the directory of the built binaries: IPMASQ_BIN_DIR, or bin in the Go module of
// the working directory.
func BinDir(t T) string {
	t.Helper()
	if directory := os.Getenv("IPMASQ_BIN_DIR"); directory != "" {
		return directory
	}
	directory := assert.Must(os.Getwd())(t)
	for {
		if _, err := os.Stat(filepath.Join(directory, "go.mod")); err == nil {
			return filepath.Join(directory, "bin")
		}
		parent := filepath.Dir(directory)
		if parent == directory {
			t.Fatalf("find binaries: not in a Go module; set IPMASQ_BIN_DIR")
		}
		directory = parent
	}
}

// CNI runs network plugins on a node through cnitool.
type CNI struct {
	// ConfDir is the directory of the network configurations, NETCONFPATH.
	ConfDir string
	// Path has the directories of the plugins, CNI_PATH. Initially these are the built binaries and
	// the reference plugins.
	Path []string
	// Env is added to the environment, for example CNI_ARGS and CAP_ARGS.
	Env []string

	node *Host
	tool string
}

// NewCNI uses the network configurations of a directory on a node.
//
// The plugins of all nodes share one file system, so networks of the same name on two nodes need
// different addresses and state directories. The results that cnitool keeps in /var/lib/cni do not
// collide, because every pod has its own path.
func NewCNI(t T, node *Host, confDir string) *CNI {
	t.Helper()
	binaries := BinDir(t)
	plugins := filepath.Join(binaries, "cni")
	tool := filepath.Join(plugins, "cnitool")
	if _, err := os.Stat(tool); err != nil {
		t.Fatalf("find cnitool: %v (`make test` builds it; IPMASQ_BIN_DIR names its directory's parent)", err)
	}
	return &CNI{ConfDir: confDir, Path: []string{binaries, plugins}, node: node, tool: tool}
}

// Result is the result of a program.
type Result struct {
	Stdout   string
	Stderr   string
	ExitCode int
}

// Write writes a network configuration file, such as 10-pods.conflist.
func (c *CNI) Write(file, text string) error {
	if err := os.MkdirAll(c.ConfDir, 0o755); err != nil {
		return fmt.Errorf("write network configuration: %w", err)
	}
	if err := os.WriteFile(filepath.Join(c.ConfDir, file), []byte(text), 0o644); err != nil {
		return fmt.Errorf("write network configuration: %w", err)
	}
	return nil
}

// Add attaches a pod to the network with interface eth0.
func (c *CNI) Add(ctx context.Context, network string, pod *Host) (Result, error) {
	return c.run(ctx, "add", network, pod)
}

// Del detaches a pod from the network.
func (c *CNI) Del(ctx context.Context, network string, pod *Host) (Result, error) {
	return c.run(ctx, "del", network, pod)
}

// Check verifies the network of a pod.
func (c *CNI) Check(ctx context.Context, network string, pod *Host) (Result, error) {
	return c.run(ctx, "check", network, pod)
}

// GC removes every attachment of the network: cnitool passes an empty list of valid attachments.
func (c *CNI) GC(ctx context.Context, network string) (Result, error) {
	return c.run(ctx, "gc", network, c.node)
}

// Status asks whether the network can take pods.
func (c *CNI) Status(ctx context.Context, network string) (Result, error) {
	return c.run(ctx, "status", network, c.node)
}

// run returns an error only if the program could not be run; the exit code is in the result.
// cnitool requires a namespace with every verb.
func (c *CNI) run(ctx context.Context, verb, network string, pod *Host) (Result, error) {
	command := c.node.Command(ctx, c.tool, verb, network, pod.Path)
	command.Env = append(os.Environ(),
		"NETCONFPATH="+c.ConfDir,
		"CNI_PATH="+strings.Join(c.Path, string(filepath.ListSeparator)))
	command.Env = append(command.Env, c.Env...)
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	err := command.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return Result{}, fmt.Errorf("run cnitool %s %s: %w", verb, network, err)
	}
	if err := ctx.Err(); err != nil {
		return Result{}, fmt.Errorf("run cnitool %s %s: %w", verb, network, err)
	}
	return Result{Stdout: stdout.String(), Stderr: stderr.String(), ExitCode: command.ProcessState.ExitCode()}, nil
}
