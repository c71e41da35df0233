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
)

// BinDir is the directory of the built binaries: what IPMASQ_BIN_DIR names or
// else bin in the module that the working directory is in.
func BinDir() (string, error) {
	if directory := os.Getenv("IPMASQ_BIN_DIR"); directory != "" {
		return directory, nil
	}
	directory, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find binaries: %w", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(directory, "go.mod")); err == nil {
			return filepath.Join(directory, "bin"), nil
		}
		parent := filepath.Dir(directory)
		if parent == directory {
			return "", errors.New("find binaries: not in a Go module; set IPMASQ_BIN_DIR")
		}
		directory = parent
	}
}

// CNI runs network plugins on a node by way of cnitool.
type CNI struct {
	// ConfDir is where the network configurations are: NETCONFPATH.
	ConfDir string
	// Path is where the plugins are: CNI_PATH. It begins as the directories
	// of the built binaries, ours and the reference plugins.
	Path []string
	// Env is added to the environment, CNI_ARGS and CAP_ARGS for instance.
	Env []string

	node *Host
	tool string
}

// NewCNI uses the network configurations of a directory on a node.
//
// The plugins have one file system, whatever the node: networks of the same name
// on two nodes need addresses and state directories of their own. The results
// that cnitool keeps in /var/lib/cni are apart, because every pod's path is.
func NewCNI(node *Host, confDir string) (*CNI, error) {
	binaries, err := BinDir()
	if err != nil {
		return nil, err
	}
	plugins := filepath.Join(binaries, "cni")
	tool := filepath.Join(plugins, "cnitool")
	if _, err := os.Stat(tool); err != nil {
		return nil, fmt.Errorf("find cnitool: %w (`make test` builds it; IPMASQ_BIN_DIR names its directory's parent)", err)
	}
	return &CNI{ConfDir: confDir, Path: []string{binaries, plugins}, node: node, tool: tool}, nil
}

// Result is what came of running a program.
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

// Add gives a pod the network, as its eth0.
func (c *CNI) Add(ctx context.Context, network string, pod *Host) (Result, error) {
	return c.run(ctx, "add", network, pod)
}

// Del takes the network from a pod.
func (c *CNI) Del(ctx context.Context, network string, pod *Host) (Result, error) {
	return c.run(ctx, "del", network, pod)
}

// Check verifies the network of a pod.
func (c *CNI) Check(ctx context.Context, network string, pod *Host) (Result, error) {
	return c.run(ctx, "check", network, pod)
}

// GC drops every attachment of the network: cnitool names none as valid.
func (c *CNI) GC(ctx context.Context, network string) (Result, error) {
	return c.run(ctx, "gc", network, c.node)
}

// Status asks whether the network can take pods.
func (c *CNI) Status(ctx context.Context, network string) (Result, error) {
	return c.run(ctx, "status", network, c.node)
}

// run returns an error if the program could not be run, and not for its exit
// code. cnitool wants a namespace with every verb, even if the verb does not.
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
