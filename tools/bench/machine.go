// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// describeMachine writes the machine and the programs as configuration of the Go benchmark format.
func describeMachine(w io.Writer) error {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return fmt.Errorf("read the kernel release: %w", err)
	}
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return err
	}
	_, model, _ := strings.Cut(string(cpuinfo), "model name\t: ") // not every architecture has it
	model, _, _ = strings.Cut(model, "\n")
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return fmt.Errorf("read the load average: %w", err)
	}
	binaries, err := topology.BinDir()
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "goos: %s\ngoarch: %s\ncpu: %s\nprocessors: %d\nkernel: %s\nload-before: %s\ndate: %s\n", runtime.GOOS, runtime.GOARCH, model,
		runtime.NumCPU(), bytes.TrimRight(u.Release[:], "\x00"), strings.Fields(string(load))[0], time.Now().UTC().Format(time.DateOnly))
	for name, program := range map[string][]string{
		"ip-masq": {binaries + "/ip-masq-reconciler", "version"}, "iptables": {"iptables-nft", "--version"}, "nft": {"nft", "--version"},
	} {
		out, err := exec.Command(program[0], program[1:]...).Output()
		if err != nil {
			return fmt.Errorf("run %s for its version: %w", program[0], err)
		}
		first, _, _ := strings.Cut(string(out), "\n")
		fmt.Fprintf(w, "%s: %s\n", name, first)
	}
	return nil
}
