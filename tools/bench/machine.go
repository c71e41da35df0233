// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
)

// describeMachine returns a description of the machine.
func describeMachine(busy float64) (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("read the kernel release: %w", err)
	}
	release := string(bytes.TrimRight(u.Release[:], "\x00"))
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return "", fmt.Errorf("read the size of memory: %w", err)
	}
	processor, err := field("/proc/cpuinfo", "model name")
	if err != nil {
		return "", err
	}
	rows := [][]string{
		{"machine", "value"},
		{"processors", fmt.Sprintf("%d × %s", runtime.NumCPU(), processor)},
		{"memory", fmt.Sprintf("%.1f GiB", float64(info.Totalram)*float64(info.Unit)/(1<<30))},
		{"kernel", release},
		{"load before the run", measure.Short(busy)},
		{"Go", runtime.Version()},
	}
	binaries, err := topology.BinDir()
	if err != nil {
		return "", err
	}
	for _, program := range [][]string{
		{binaries + "/ip-masq-reconciler", "version"}, {"iptables-nft", "--version"}, {"iptables-legacy", "--version"}, {"nft", "--version"},
	} {
		out, err := exec.Command(program[0], program[1:]...).Output()
		if err != nil {
			return "", fmt.Errorf("run %s for its version: %w", program[0], err)
		}
		name := strings.TrimPrefix(program[0], binaries+"/")
		rows = append(rows, []string{name, strings.TrimSpace(strings.SplitN(string(out), "\n", 2)[0])})
	}
	return strings.Replace(table(rows), "---:", "---", 1), nil
}

// load returns the load average of the last minute.
func load() (float64, error) {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, fmt.Errorf("read the load average: %w", err)
	}
	return strconv.ParseFloat(strings.Fields(string(text))[0], 64)
}

// field returns the value of a line "name : value" of a file.
func field(path, name string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if key, value, found := strings.Cut(line, ":"); found && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value), nil
		}
	}
	return "unknown", nil
}
