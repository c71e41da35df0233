// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Reason is why the node is not ready. One fault has one reason, which is its ID in status, doctor, check,
// /readyz, the metric not_ready, the log and its alert, so that it pages once. The program that reverts rules
// is a field of the log and no label of the metric: its values are unbounded.
type Reason string

// The reasons.
const (
	ReasonRules    Reason = "rules"
	ReasonState    Reason = "state"
	ReasonSource   Reason = "source"
	ReasonConflict Reason = "conflict"
	ReasonConflist Reason = "conflist"
	ReasonPlugin   Reason = "plugin"
	ReasonBackend  Reason = "backend"
	ReasonStandby  Reason = "standby"
	ReasonFlapping Reason = "flapping"
	ReasonAddress  Reason = "output-address"
)

// Fault is a reason with what it means. docs/troubleshooting.md has a section for each, to which its alert
// leads.
type Fault struct {
	Reason Reason
	Cause  string // a sentence, also in the documents
	Remedy string
}

// Faults returns all of them.
func Faults() []Fault {
	return []Fault{
		{ReasonRules, "Rules differ, or may differ, from what the sources ask for.",
			"Correct a policy that cannot be applied. A reconciler that runs repairs all other rules within " +
				"a second. Without one, start it or run ip-masq-reconciler once. If another program wrote " +
				"rules of the chain, delete them, or, if the chain is in the backend that ip-masq uses, state " +
				"another masqChain."},
		{ReasonState, "The dataDir or the directory of conflists cannot be used.",
			"Free space, make the directory writable, or state the right one in data_dir or cni_conf_dir " +
				"and restart the reconciler. " +
				"If a newer version wrote the files, install that version again."},
		{ReasonSource, "A plugin entry, an agent file, reconciler.toml or plugin.toml is invalid.",
			"Correct the file, or in a cluster the ConfigMap. The reconciler reads it at once."},
		{ReasonConflict, "Two sources, or two directories as dataDir, conflict.",
			"State the same value in both sources, or remove it from one. State one dataDir everywhere, " +
				"and run cleanup for the other one."},
		{ReasonConflist,
			"The plugin entry is missing or cannot be written, or every ADD fails because of it.",
			"Place the plugin entry behind the plugin that creates the interface; ip-masq-reconciler " +
				"install inserts it there. " +
				"Let the reconciler write to the directory of conflists. If another program removes the " +
				"entry, change that program's settings."},
		{ReasonPlugin, "The plugin's binary is missing or not executable.",
			"Run ip-masq-reconciler install. In a cluster, delete this node's pod of ip-masq, whose init " +
				"container installs the plugin."},
		{ReasonBackend, "A program, a part of the kernel or a capability is missing.",
			"Install the program, load the modules or add the capability. Or set backend to \"nftables\", " +
				"which needs no program."},
		{ReasonStandby, "Another reconciler runs on the node.",
			"Stop one of the two: the service of the host, or the pod."},
		{ReasonFlapping, "Another program reverts the rules repeatedly.",
			"Stop that program, or configure it so that it does not change the chain. Then run " +
				"ip-masq-reconciler once."},
		{ReasonAddress, "The node has no usable address in outputAddresses.",
			"Configure an address of the list on the node, or add a prefix to outputAddresses that " +
				"contains one of its addresses."},
	}
}

// Problem is one cause of a node that is not ready. In JSON, Err is its message.
type Problem struct {
	Reason  Reason          `json:"reason"`
	Source  policy.SourceID `json:"source,omitzero"` // whose policy is not in force
	Chain   string          `json:"chain,omitempty"` // of a problem with rules or a conflict
	Err     error           `json:"-"`
	Waiting bool            `json:"-"` // for something that is expected to come by itself

	BesideRules bool `json:"-"` // the rules in the kernel are right all the same
}

// problemFields are those that JSON writes as they are.
type problemFields Problem

// MarshalJSON implements json.Marshaler.
func (p Problem) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		problemFields
		Message string `json:"message"`
	}{problemFields(p), p.Err.Error()})
}

// UnmarshalJSON implements json.Unmarshaler.
func (p *Problem) UnmarshalJSON(text []byte) error {
	var message struct{ Message string }
	err := errors.Join(json.Unmarshal(text, (*problemFields)(p)), json.Unmarshal(text, &message))
	p.Err = errors.New(message.Message)
	return err
}

// SameCause reports whether two problems are about the same of the same source and chain.
func (p Problem) SameCause(q Problem) bool {
	return p.Reason == q.Reason && p.Source == q.Source && p.Chain == q.Chain
}

// FindingWarning is a warning that doctor has as a finding.
type FindingWarning struct {
	error
	ID string // of the finding
}

// Unwrap implements what errors.As needs.
func (w FindingWarning) Unwrap() error { return w.error }

// aboutRules reports whether the rules of policies in force are affected, rather than a policy that
// is not in force, or what a later sync or an ADD needs.
func (p Problem) aboutRules() bool {
	return p.Source == (policy.SourceID{}) && p.failure() && !p.BesideRules
}

// failure reports whether something could not be read or written, rather than that it is invalid.
func (p Problem) failure() bool {
	return p.Reason == ReasonRules || p.Reason == ReasonState || p.Reason == ReasonBackend
}

func isDrift(err error) bool {
	_, is := errors.AsType[*enforce.DriftError](err)
	return is
}

// isDiskFault reports whether an error is that of a file system which is full, read-only or broken.
func isDiskFault(err error) bool {
	for _, fault := range []error{unix.ENOSPC, unix.EDQUOT, unix.EROFS, unix.EIO} {
		if errors.Is(err, fault) {
			return true
		}
	}
	return false
}
