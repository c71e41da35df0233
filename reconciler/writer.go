// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// hostProc returns /proc if its pids are those of the host, which the kernel names in its notifications, else "".
func hostProc() string {
	const initial = "pid:[4026531836]" // PROC_PID_INIT_INO of the kernel
	if namespace, err := os.Readlink("/proc/self/ns/pid"); err != nil || namespace != initial {
		return ""
	}
	return "/proc"
}

// writerOf returns the program that made a commit. While it runs, proc has its parent and its cgroup. The kernel may have
// given the pid of one that has ended to another program, so the name is compared.
func writerOf(c nfnetlink.Commit, proc string) reconcile.Writer {
	w := reconcile.Writer{Process: reconcile.Process{PID: c.PID, Program: c.Program}}
	if proc == "" || !c.Touched || programOf(proc, c.PID) != c.Program {
		return w
	}
	_, parent, _ := strings.Cut(readProc(proc, c.PID, "status"), "\nPPid:")
	parent, _, _ = strings.Cut(parent, "\n")
	if pid, err := strconv.ParseUint(strings.TrimSpace(parent), 10, 32); err == nil && pid != 0 {
		w.Parent = reconcile.Process{PID: uint32(pid), Program: programOf(proc, uint32(pid))}
	}
	for line := range strings.Lines(readProc(proc, c.PID, "cgroup")) { // HIERARCHY:CONTROLLERS:PATH, several in version 1
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if path := parts[len(parts)-1]; len(path) > len(w.Cgroup) {
			w.Cgroup = path
		}
	}
	return w
}

// programOf returns the name of a process, "" if it has ended.
func programOf(proc string, pid uint32) string {
	return strings.TrimSuffix(readProc(proc, pid, "comm"), "\n")
}

// readProc returns a file of a process, "" if it has ended.
func readProc(proc string, pid uint32, name string) string {
	text, err := os.ReadFile(filepath.Join(proc, strconv.FormatUint(uint64(pid), 10), name))
	if err != nil {
		return ""
	}
	return string(text)
}
