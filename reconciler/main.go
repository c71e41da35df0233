// SPDX-License-Identifier: Apache-2.0

// Command ip-masq-reconciler keeps a node's masquerade rules right: it repairs
// drift when it happens, merges what conflists and the agents' files state, and
// answers what people ask about the node. It takes the flags of ip-masq-agent and
// ip-masq-agent-v2 as they are.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

// version is stamped by the linker.
var version = "unknown"

// What the process ends with (by contract).
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
	exitDrift = 3
)

// errDrift ends a command that found drift, which it has told of.
var errDrift = errors.New("drift found")

// usageError is a mistake in the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	a := &app{out: os.Stdout, err: os.Stderr}
	root := a.root()
	root.SetArgs(withTwoDashes(root, args))
	command, err := root.ExecuteContextC(ctx)
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errDrift):
		// It is told of; what else is wrong is not.
		if also := strings.TrimSuffix(strings.TrimSuffix(err.Error(), errDrift.Error()), "\n"); also != "" {
			fmt.Fprintf(os.Stderr, "ip-masq-reconciler: %s\n", also)
		}
		return exitDrift
	case errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "ip-masq-reconciler: %v\nSee %s --help.\n", err, command.CommandPath())
		return exitUsage
	}
	fmt.Fprintf(os.Stderr, "ip-masq-reconciler: %v\n", err)
	return exitError
}
