// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"errors"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

func nodeChecks() []check {
	return []check{
		{Finding{ID: "agent-running", Severity: SeverityProblem,
			Cause:  "ip-masq-agent is running, and rewrites the chain from its own configuration every minute.",
			Remedy: "Delete its DaemonSet. Its ConfigMap may stay: the reconciler reads it."}, agentRunning},
		{Finding{ID: "ebpf-masquerade", Severity: SeverityNotice,
			Cause: "An eBPF data plane is in use, which may masquerade without rules of netfilter.",
			Remedy: "Cilium: set enable-bpf-masquerade to false and masquerading off, or list the same prefixes in its own ip-masq-agent; " +
				`Calico: set natOutgoing: false in the IPPool. Until then set guard to "off": it catches what eBPF masquerades later.`}, ebpfMasquerade},
		{Finding{ID: "missing-capability", Severity: SeverityProblem,
			Cause: "This process lacks capabilities that it needs to manage the rules.",
			Remedy: "Run as root, and do not take the capability away: name it in securityContext.capabilities.add of a DaemonSet, " +
				"or in CapabilityBoundingSet in a systemd unit (with User= in AmbientCapabilities too)."}, missingCapabilities},
		{Finding{ID: "forwarding-off", Severity: SeverityProblem,
			Cause: "The kernel does not forward packets, so pods cannot reach other networks.",
			Remedy: "Set the sysctl to 1, in /etc/sysctl.d to make it last. " +
				"On a node that never had a pod, wait for the first one: most main plugins set it."}, forwardingOff},
		{Finding{ID: "mixed-iptables", Severity: SeverityNotice,
			Cause: "Both variants of iptables are in use. Packets pass through the rules of both, and each program shows only its own.",
			Remedy: "Use one variant on the node (update-alternatives --set iptables ...), " +
				"and reboot to remove the rules of the other."}, mixedVariants},
		{Finding{ID: "saved-ruleset", Severity: SeverityNotice,
			Cause: "A saved ruleset changes the rules of ip-masq when it is loaded, at boot or when its service restarts.",
			Remedy: "Remove the chains and tables of ip-masq from the file, " +
				"and let it flush only its own rules (not table nat, nor the ruleset)."}, savedRulesets},
	}
}

// agentRunning looks for processes of agents, as far as this one sees them. Only those of root count: other users can
// give theirs any name, and cannot change rules.
func agentRunning(e *examination, f *Finding) {
	for _, entry := range e.readDir("proc") {
		info, err := entry.Info()
		if _, notProcess := strconv.Atoi(entry.Name()); err != nil || notProcess != nil {
			continue
		}
		// A process that is not dumpable owns this directory all the same, and not the files in it (proc(5)).
		if uid, _ := safefile.Owner(info); uid != 0 && !safefile.IsOwn(info) {
			continue
		}
		cmdline, _, err := safefile.ReadFile(filepath.Join(e.Root, "proc", entry.Name(), "cmdline"), maxFile)
		if ended := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH); err != nil && !ended {
			e.noteAs("list the processes", err)
			return
		}
		args := strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00")
		if strings.HasPrefix(path.Base(args[0]), "ip-masq-agent") {
			f.add("process %s (%s)", entry.Name(), policy.Quote(strings.Join(args, " ")))
		}
	}
}

func ebpfMasquerade(e *examination, f *Finding) {
	for line := range strings.Lines(e.read("proc/net/dev")) {
		switch name, _, _ := strings.Cut(strings.TrimSpace(line), ":"); name {
		case "cilium_host":
			f.add("interface cilium_host: Cilium")
		case "bpfin.cali", "bpfout.cali":
			f.Severity = SeverityProblem
			f.add("interface %s: Calico's eBPF data plane", name)
		}
	}
	const mapDir = "sys/fs/bpf/tc/globals"
	for _, m := range e.readDir(mapDir) {
		if strings.HasPrefix(m.Name(), "cilium_snat_") {
			f.Severity = SeverityProblem
			f.add("/%s/%s: Cilium translates sources in eBPF", mapDir, m.Name())
		}
	}
}

func missingCapabilities(e *examination, f *Finding) {
	const capNetAdmin, capNetRaw = 12, 13 // linux/capability.h
	_, line, _ := strings.Cut("\n"+e.read("proc/self/status"), "\nCapEff:")
	line, _, _ = strings.Cut(line, "\n")
	effective, err := strconv.ParseUint(strings.TrimSpace(line), 16, 64)
	if err != nil {
		e.note(errors.New("find the capabilities of this process: /proc/self/status has no CapEff that can be read"))
		return
	}
	if effective&(1<<capNetAdmin) == 0 {
		f.add("CAP_NET_ADMIN: to read or write netfilter")
	}
	if e.hasChoice(policy.IPTables, netfilter.VariantLegacy) && effective&(1<<capNetRaw) == 0 {
		f.add("CAP_NET_RAW: iptables-legacy opens a raw socket")
	}
}

func forwardingOff(e *examination, f *Finding) {
	sysctls := []string{"net/ipv4/ip_forward"}
	if slices.ContainsFunc(e.Rules.Policies(), func(p policy.Policy) bool { return p.EnableIPv6.Value }) {
		sysctls = append(sysctls, "net/ipv6/conf/all/forwarding")
	}
	for _, name := range sysctls { // without the family in the kernel there is no file
		if strings.TrimSpace(e.read("proc/sys/"+name)) == "0" {
			f.add("%s is 0", strings.ReplaceAll(name, "/", "."))
		}
	}
}

func mixedVariants(e *examination, f *Finding) {
	rules, err := e.Variants(e.ctx)
	e.noteAs("find which variants of iptables are in use", err)
	for _, variant := range slices.Sorted(maps.Keys(rules)) {
		if len(rules) > 1 {
			f.add("iptables-%s has %d rules in table nat", variant, rules[variant])
		}
	}
}

func savedRulesets(e *examination, f *Finding) {
	for _, service := range []struct {
		name  string
		files []string
	}{
		{"netfilter-persistent.service", []string{"etc/iptables/rules.v4", "etc/iptables/rules.v6"}},
		{"iptables.service", []string{"etc/sysconfig/iptables", "etc/iptables/iptables.rules"}},
		{"ip6tables.service", []string{"etc/sysconfig/ip6tables", "etc/iptables/ip6tables.rules"}},
		{"nftables.service", []string{"etc/nftables.conf", "etc/sysconfig/nftables.conf"}},
	} {
		state := "not enabled" // by systemd
		for _, dir := range []string{"etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"} {
			wanted, err := filepath.Glob(filepath.Join(e.Root, dir, "*.wants", service.name))
			if e.note(err); len(wanted) > 0 {
				state = "enabled"
			}
		}
		for _, file := range service.files {
			for _, change := range e.changesBy(e.read(file), state == "enabled") {
				f.add("/%s (%s, %s): %s", file, service.name, state, change)
			}
		}
	}
}

// changesBy returns what a saved ruleset does to the rules of ip-masq. Flushing counts
// only if a service loads the ruleset.
func (e *examination) changesBy(text string, enabled bool) []string {
	words := map[string]bool{}
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		for i, word := range fields {
			words[strings.TrimPrefix(word, ":")] = true
			if i > 0 && fields[i-1] == "flush" {
				words["flush "+strings.TrimSuffix(word, ";")] = true
			}
		}
	}
	var changes []string
	chains := []string{policy.DefaultChain}
	for _, p := range e.Rules.Policies() {
		chains = append(chains, p.Chain)
	}
	slices.Sort(chains)
	for _, chain := range slices.Compact(chains) {
		if words[chain] || words["masq-"+chain] || words["guard-"+chain] {
			changes = append(changes, "contains chain "+chain)
		}
	}
	if enabled && words["flush ruleset"] {
		changes = append(changes, "flushes the ruleset, with the rules of ip-masq")
	}
	if enabled && words["*nat"] && e.hasChoice(policy.IPTables, "") {
		changes = append(changes, "replaces table nat, with the chains of ip-masq")
	}
	return changes
}

// Running is what is known of the reconciler of the node.
type Running struct {
	Active bool      // a process holds the instance lock of the dataDir
	Seen   time.Time // when a reconciler last made a sync; zero if none did
	Err    error     // why the active one does not answer
	// ManagesConflist tells that the reconciler reports a missing plugin entry as a fault.
	ManagesConflist bool
}

func reconcilerChecks() []check {
	return []check{
		{Finding{ID: "agent-files-invalid", Severity: SeverityNotice,
			Cause:  "A part of the agent files is ignored.",
			Remedy: "Correct the file, or in a cluster the ConfigMap. The reconciler reads it at once."}, warned},
		{Finding{ID: "agent-files-missing", Severity: SeverityNotice,
			Cause:  "The directory of the agent files is gone, and the policy that was read from it stays in force.",
			Remedy: "Mount or create the directory again. To end the policy, put a file there that states another one, or run ip-masq-reconciler cleanup."}, warned},
		{Finding{ID: "unknown-key", Severity: SeverityProblem,
			Cause:  "Agent files have keys that are unknown and are ignored, so the policy in force may not be what you wrote.",
			Remedy: "Correct the names of the keys in the file, or in a cluster in the ConfigMap; remove keys that ip-masq does not have. The reconciler reads it at once."}, warned},
		{Finding{ID: "listen-failed", Severity: SeverityProblem,
			Cause:  "The reconciler cannot bind an address, so probes or metrics get no answer.",
			Remedy: "Free the address (ss -ltnp names the program that has it), or set health_listen or metrics_listen to another."}, warned},
		{Finding{ID: "reconciler-not-running", Severity: SeverityProblem,
			Cause: "No reconciler is active, so only ADDs repair rules, and changes of agent files have no effect.",
			Remedy: "Start the service (systemctl start ip-masq-reconciler), or find out why the pod of its DaemonSet does not run on this node. " +
				"If a reconciler runs, it has another data_dir: state the dataDir of the plugin there, " +
				"and in a container mount that directory of the node at the same path."}, reconcilerNotRunning},
		{Finding{ID: "reconciler-not-answering", Severity: SeverityProblem,
			Cause: "A reconciler holds the instance lock and does not answer on its socket, so it may not repair anything.",
			Remedy: "If the process is stopped (state T in ps), continue it with kill -CONT PID. Otherwise read its log, and restart it. " +
				"A reconciler that could not create the socket, or of an older version, does not answer either."}, reconcilerNotAnswering},
		{Finding{ID: "pods-without-record", Severity: SeverityNotice,
			Cause:  "Some pods are not on record, so nonMasqueradeNamespaces does not exempt them.",
			Remedy: "Recreate the pods of these namespaces that were started before the conflist had the plugin entry, or while they could not be recorded."}, podsWithoutRecord},
	}
}

func reconcilerNotRunning(e *examination, f *Finding) {
	r := e.Reconciler
	switch {
	case r == nil || r.Active:
	case !r.Seen.IsZero():
		f.add("no process holds the instance lock of %s; a reconciler last made a sync %s ago, at %s",
			policy.Quote(e.DataDir), Age(time.Since(r.Seen)), r.Seen.UTC().Format(time.RFC3339))
	case len(e.State.Sources) > 0: // the plugin alone
		f.Severity = SeverityNotice
		f.add("none has run with %s", policy.Quote(e.DataDir))
	}
}

func reconcilerNotAnswering(e *examination, f *Finding) {
	if r := e.Reconciler; r != nil && r.Active && r.Err != nil {
		f.add("%v; look on the host for its process (ps -C ip-masq-reconciler)", r.Err)
	}
}

func podsWithoutRecord(e *examination, f *Finding) {
	if !slices.ContainsFunc(e.Rules.Policies(), func(p policy.Policy) bool { return len(p.Namespaces) > 0 }) {
		return
	}
	if e.noteAs("read the records of pods", e.PodsErr); e.PodsWithoutRecord > 0 {
		f.add("attachments without a record: %d", e.PodsWithoutRecord)
	}
}
