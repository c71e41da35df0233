// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// killChildren ends the children that a thread started, and all that they started. It takes the
// file /proc/PID/task/TID/children, which is exact even if a program is a script that has become
// another program by now: the path of the executable would not tell. A process group would be
// simpler, but go-iptables makes none, and another process cannot move a program into one once it
// runs.
func killChildren(file string) {
	if self, err := os.Readlink("/proc/self"); err != nil || self != strconv.Itoa(os.Getpid()) {
		return // the numbers are those of another PID namespace
	}
	for _, pid := range childrenIn(file) {
		process, err := os.FindProcess(pid)
		if err != nil {
			continue
		}
		// By now the number may be that of another process. From here on the handle refers to the child.
		if slices.Contains(childrenIn(file), pid) {
			_ = process.Signal(unix.SIGSTOP) // it starts no more programs
			threads, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/children")
			for _, thread := range threads {
				killChildren(thread)
			}
			_ = process.Kill()
		}
		_ = process.Release()
	}
}

func childrenIn(file string) []int {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil // the thread has ended
	}
	var pids []int
	for _, word := range strings.Fields(string(text)) {
		if pid, err := strconv.Atoi(word); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}
