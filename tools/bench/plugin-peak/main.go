// SPDX-License-Identifier: Apache-2.0

// Command plugin-peak runs the program in PEAK_OF with the given arguments and writes its peak
// memory in bytes to the file in PEAK_FILE. The kernel includes the memory of the starting process,
// which is small here and large in the benchmark itself.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
)

func main() { os.Exit(run()) }

func run() int {
	c := exec.Command(os.Getenv("PEAK_OF"), os.Args[1:]...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := c.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "plugin-peak:", err)
		return 1
	}
	peak := c.ProcessState.SysUsage().(*syscall.Rusage).Maxrss << 10 // from KiB
	if err := os.WriteFile(os.Getenv("PEAK_FILE"), []byte(strconv.FormatInt(peak, 10)), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "plugin-peak:", err)
		return 1
	}
	return 0
}
