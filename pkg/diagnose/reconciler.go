// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Running is what is known of the reconciler of the node.
type Running struct {
	Active bool      // a process holds the instance lock of the dataDir
	Seen   time.Time // when a reconciler last made a sync; zero if none did
	Err    error     // why the active one does not answer
	// ManagesConflist tells that the reconciler reports a missing plugin entry as a fault.
	ManagesConflist bool
}

// reconcilerChecks look at the reconciler of the node, and at its files.
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
	listed := slices.ContainsFunc(e.Rules.Policies(), func(p policy.Policy) bool { return len(p.Namespaces) > 0 })
	if listed && e.PodsWithoutRecord > 0 {
		f.add("attachments without a record: %d", e.PodsWithoutRecord)
	}
	if listed {
		e.noteAs("read the records of pods", e.PodsErr)
	}
}
