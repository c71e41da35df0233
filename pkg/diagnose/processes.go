// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// process is one that runs on the node, as far as this process sees.
type process struct {
	pid  int
	comm string // at most 15 bytes of the program's name
	args []string
}

func (e *examination) readProcesses() error {
	entries, err := os.ReadDir(e.path("proc"))
	if err != nil {
		return fmt.Errorf("list the processes: %w", err)
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		comm, errComm := readFile(e.path("proc", entry.Name(), "comm"))
		cmdline, errLine := readFile(e.path("proc", entry.Name(), "cmdline"))
		if err := errors.Join(errComm, errLine); err != nil {
			if gone(err) {
				continue
			}
			return fmt.Errorf("list the processes: %w", err)
		}
		p := process{pid: pid, comm: string(bytes.TrimSpace(comm))}
		for arg := range bytes.SplitSeq(bytes.TrimRight(cmdline, "\x00"), []byte{0}) {
			p.args = append(p.args, string(arg))
		}
		e.processes = append(e.processes, p)
	}
	return nil
}

// gone reports whether a process ended while it was read.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
}

// name returns the name of the program: that which it was started by or, where
// an interpreter runs it, that of the script.
func (p process) name() string {
	names := []string{p.comm}
	if len(p.args) > 0 && p.args[0] != "" {
		names = []string{path.Base(p.args[0])}
		if strings.HasPrefix(names[0], "python") {
			for _, arg := range p.args[1:] {
				if !strings.HasPrefix(arg, "-") {
					return path.Base(arg)
				}
			}
		}
	}
	return names[0]
}

// agentRunning looks for the agents whose work is ours now.
func agentRunning(e *examination) ([]Finding, error) {
	f := Finding{ID: "agent-running", Severity: SeverityProblem,
		Summary: "ip-masq-agent is running: it rewrites the chain from its own configuration every minute.",
		Remedy:  "Delete its DaemonSet. Its ConfigMap may stay: the reconciler reads it."}
	for _, p := range e.processes {
		if strings.HasPrefix(p.name(), "ip-masq-agent") {
			f.Detail = append(f.Detail, fmt.Sprintf("process %d: %s", p.pid, policy.Quote(strings.Join(p.args, " "))))
		}
	}
	return []Finding{f}, nil
}

// firewallManagers looks for programs that flush tables when they reload.
func firewallManagers(e *examination) ([]Finding, error) {
	firewalld := Finding{ID: "firewalld-running", Severity: SeverityNotice,
		Summary: "firewalld is running: a reload of it may flush iptables, our chain with it, until it is put back.",
		Remedy:  "Set backend to \"nftables\", whose tables firewalld leaves alone, or FirewallBackend=nftables in firewalld.conf; and put the pods' interfaces into zone trusted."}
	for _, p := range e.processes {
		if p.name() == "firewalld" {
			firewalld.Detail = append(firewalld.Detail, fmt.Sprintf("process %d", p.pid))
		}
	}
	ufw := Finding{ID: "ufw-enabled", Severity: SeverityNotice,
		Summary: "ufw is enabled: it drops what is forwarded unless it is told otherwise, and a reload runs /etc/ufw/before.rules, which may flush table nat.",
		Remedy:  "Set DEFAULT_FORWARD_POLICY=\"ACCEPT\" in /etc/default/ufw or allow routed traffic of pods, and flush no table nat in before.rules."}
	conf, err := readFile(e.path("etc/ufw/ufw.conf"))
	if slices.Contains(strings.Fields(string(conf)), "ENABLED=yes") {
		ufw.Detail = []string{"/etc/ufw/ufw.conf has ENABLED=yes"}
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return []Finding{firewalld, ufw}, err
}

// ebpfMasquerade looks for data planes that may masquerade before netfilter gets
// to see a packet, or without it.
func ebpfMasquerade(e *examination) ([]Finding, error) {
	f := Finding{ID: "ebpf-masquerade", Severity: SeverityNotice,
		Summary: "A data plane in eBPF is here, which may masquerade where no rule of netfilter is asked.",
		Remedy: "Cilium: set enable-bpf-masquerade to false and masquerading off, or list the same prefixes in its own ip-masq-agent; " +
			"Calico: set natOutgoing: false in the IPPool."}
	names, err := e.Interfaces()
	if err != nil {
		err = fmt.Errorf("list the interfaces: %w", err)
	}
	for _, name := range names {
		switch name {
		case "cilium_host":
			f.Detail = append(f.Detail, "interface cilium_host: Cilium")
		case "bpfin.cali", "bpfout.cali":
			f.Severity = SeverityProblem
			f.Detail = append(f.Detail, "interface "+name+": Calico's eBPF data plane")
		}
	}
	for _, l := range e.lists {
		for _, p := range l.plugins {
			if p.kind() == "cilium-cni" {
				f.Detail = append(f.Detail, policy.Quote(l.File)+": plugin cilium-cni")
			}
		}
	}
	maps, errMaps := os.ReadDir(e.path("sys/fs/bpf/tc/globals"))
	if errors.Is(errMaps, fs.ErrNotExist) {
		errMaps = nil
	}
	shown := false
	for _, m := range maps {
		switch {
		case strings.HasPrefix(m.Name(), "cilium_snat_"):
			f.Severity = SeverityProblem
			f.Detail = append(f.Detail, "/sys/fs/bpf/tc/globals/"+m.Name()+": Cilium translates sources in eBPF")
		case strings.HasPrefix(m.Name(), "cilium_") && !shown:
			shown = true
			f.Detail = append(f.Detail, "/sys/fs/bpf/tc/globals/"+m.Name()+": maps of Cilium")
		}
	}
	return []Finding{f}, errors.Join(err, errMaps)
}
