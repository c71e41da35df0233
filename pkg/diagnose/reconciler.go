// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"maps"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Running is what is known of the reconciler of the node.
type Running struct {
	Active bool      // a process holds the instance lock of the dataDir
	Seen   time.Time // when a reconciler last took or released that lock; zero if none did

	// Answers tells that the active reconciler answers, and Err why it does not.
	Answers bool
	Err     error

	// What it answered on its socket.
	Unserved map[string]string // why endpoints are not served, by the keys of their addresses
	// ManagesConflist tells that a plugin entry which is not inserted is one of its faults.
	ManagesConflist bool
}

// reconcilerChecks look at the reconciler of the node, and at its files.
func reconcilerChecks() []check {
	return []check{
		{Finding{ID: "agent-files-invalid", Severity: SeverityNotice,
			Summary: "A part of the agent files is ignored.",
			Remedy:  "Correct the file, or in a cluster the ConfigMap, as each line says; the reconciler reads it at once."}, warned},
		{Finding{ID: "reconciler-data-dir", Severity: SeverityProblem,
			Summary: "A reconciler runs on this node and does not use this dataDir: the two have different policies and revert each other's rules.",
			Remedy: "Make the reconciler and the plugin use one directory: data_dir, and in a container the node's directory mounted there. " +
				"Then restart the reconciler. To see its state, name its directory with --data-dir, or run the command in its container."}, reconcilerWithoutLock},
		{Finding{ID: "reconciler-not-running", Severity: SeverityProblem,
			Summary: "No reconciler is active: only ADDs repair rules, and changes of agent files have no effect.",
			Remedy: "Start it: systemctl start ip-masq-reconciler, or see why the pod of its DaemonSet does not run on this node. " +
				"Rules stay as they are until then."}, reconcilerNotRunning},
		{Finding{ID: "reconciler-not-answering", Severity: SeverityProblem,
			Summary: "A reconciler holds the instance lock and does not answer on its socket: it may repair nothing.",
			Remedy: "Continue one that is stopped (state T in ps: kill -CONT PID). Otherwise see its log, and restart it. " +
				"One without a socket could not create it, as its log says, or is of an older version."}, reconcilerNotAnswering},
		{Finding{ID: "pods-without-record", Severity: SeverityNotice,
			Summary: "Some pods are in no namespace for nonMasqueradeNamespaces: they started before a version that records pods.",
			Remedy:  "Recreate the pods that run for longer than this version is installed and that should be exempt."}, podsWithoutRecord},
		{Finding{ID: "listen-address-busy", Severity: SeverityProblem,
			Summary: "The reconciler cannot serve health or metrics.",
			Remedy:  "Stop the program that has the address, or set another one; the reconciler tries again by itself."}, busyAddresses},
	}
}

func reconcilerWithoutLock(e *examination, f *Finding) {
	r := e.Reconciler
	if r == nil || r.Active {
		return
	}
	for _, p := range e.reconcilers() {
		f.add("%s runs and does not hold the instance lock of %s: it has another data_dir, or cannot write there", p, policy.Quote(e.DataDir))
	}
}

func reconcilerNotRunning(e *examination, f *Finding) {
	r := e.Reconciler
	switch {
	case r == nil || r.Active || len(e.reconcilers()) > 0:
	case !r.Seen.IsZero():
		f.add("no process holds the instance lock of %s; one last started or ended %s ago, at %s",
			policy.Quote(e.DataDir), Age(time.Since(r.Seen)), r.Seen.UTC().Format(time.RFC3339))
	case len(e.State.Sources) > 0: // the plugin alone
		f.Severity = SeverityNotice
		f.add("none has run with %s", policy.Quote(e.DataDir))
	}
}

func reconcilerNotAnswering(e *examination, f *Finding) {
	r := e.Reconciler
	if r == nil || !r.Active || r.Answers {
		return
	}
	for _, p := range e.reconcilers() {
		f.add("%s", p)
	}
	if len(f.Detail) == 0 {
		f.add("no process of it can be seen from here; look on the host for ip-masq-reconciler in state T (ps -C ip-masq-reconciler)")
	}
	if r.Err != nil {
		f.add("%v", r.Err)
	}
}

func podsWithoutRecord(e *examination, f *Finding) {
	listed := slices.ContainsFunc(e.Rules.Policies(), func(p policy.Policy) bool { return len(p.Namespaces) > 0 })
	if listed && e.PodsWithoutRecord > 0 {
		f.add("attachments without a record: %d", e.PodsWithoutRecord)
	}
	if listed {
		e.noteAs("read the records of pods", e.PodsErr)
	}
}

func busyAddresses(e *examination, f *Finding) {
	if e.Reconciler == nil {
		return
	}
	for _, key := range slices.Sorted(maps.Keys(e.Reconciler.Unserved)) {
		f.add("%s: %s", key, e.Reconciler.Unserved[key])
	}
}

// OtherCommands returns the commands of ip-masq-reconciler that end, all but run.
func OtherCommands() []string {
	return []string{"check", "cleanup", "completion", "doctor", "explain", "help", "install", "once", "render", "status", "uninstall", "version", "who"}
}

// reconcilers returns the processes of reconcilers in this network namespace, as far as this process sees them.
func (e *examination) reconcilers() (found []process) {
	namespace := func(pid string) string {
		link, err := os.Readlink(e.path("proc", pid, "ns/net"))
		if err != nil {
			return pid // equal to no other
		}
		return link
	}
	runs := func(args []string) bool { // run is the command without a name, too
		return !slices.ContainsFunc(args, func(arg string) bool { return slices.Contains(OtherCommands(), arg) })
	}
	for _, p := range e.processes {
		if p.name() == "ip-masq-reconciler" && runs(p.args[1:]) && namespace(strconv.Itoa(p.pid)) == namespace("self") {
			found = append(found, p)
		}
	}
	return found
}
