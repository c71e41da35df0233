// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Severity tells how bad a finding is.
type Severity string

// The severities.
const (
	SeverityFault   Severity = "fault"   // the node is not ready
	SeverityProblem Severity = "problem" // defeats the policy, or will break
	SeverityNotice  Severity = "notice"  // will surprise
)

// rank is the place in lists: problems before notices. Examine finds no faults.
func (s Severity) rank() int {
	if s == SeverityProblem {
		return 0
	}
	return 1
}

// Finding is a situation that was found on the node.
type Finding struct {
	ID       string   `json:"id"` // stable, in kebab-case
	Severity Severity `json:"severity"`
	Cause    string   `json:"cause"`   // one sentence
	Details  []string `json:"details"` // where it was found, a line each
	Remedy   string   `json:"remedy"`
}

func (f *Finding) add(format string, args ...any) {
	f.Details = append(f.Details, fmt.Sprintf(format, args...))
}

// Text returns the findings as text: severity and ID, then summary, details and remedy.
func Text(findings []Finding) string {
	if len(findings) == 0 {
		return "No faults, problems or notices.\n"
	}
	var texts []string
	for _, f := range findings {
		text := fmt.Sprintf("%s: %s\n  %s\n", f.Severity, f.ID, f.Cause)
		for _, line := range policy.First(12, f.Details) {
			text += "    - " + strings.ReplaceAll(line, "\n", "\n      ") + "\n"
		}
		texts = append(texts, text+"  Remedy: "+f.Remedy+"\n")
	}
	return strings.Join(texts, "\n")
}

// Host is what Examine reads, beside the network namespace of the calling thread. Rules, Warnings and
// IPTablesVersion must be set. The zero value of every other field stands for a host without it.
type Host struct {
	// Root is the directory that has proc, sys, etc, run and var; "" is the root directory.
	// Its proc/net and proc/sys/net are those of the process's own network namespace.
	Root string

	State store.State
	Rules *enforce.State // what the documents in State ask for, and what was observed

	ConfDir    config.ConfDir
	ConfDirErr error // of reading it
	// BinDir is the runtime's directory of plugins and DataDir the reconciler's; "" is not examined.
	BinDir, DataDir string

	Pods []store.Pod // on record
	// PodsWithoutRecord has a line for each cause why pods are not known. PodsErr is why records could not be
	// read.
	PodsWithoutRecord []string
	PodsErr           error

	// IPTablesVersion returns the version of the host's iptables of a variant.
	IPTablesVersion func(variant string) string

	// Reconciler is what is known of the reconciler of the node; nil if it was not examined.
	Reconciler *Running
	// Warnings returns the warnings of a dry run that are the details of a finding.
	Warnings func(id string) []error
}

type examination struct {
	Host
	lists       []list
	pods        []netip.Prefix
	violations  []violation
	notExamined []string // errors
}

// Examine returns the findings that have details, sorted by severity and then by ID.
func Examine(h Host) []Finding {
	h.Root = cmp.Or(h.Root, "/")
	e := &examination{Host: h}
	e.readLists()
	e.readPodNetworks()
	e.note(e.findViolations())
	e.noteAs("read the records of pods", e.PodsErr)
	var found []Finding
	for _, f := range Findings() {
		for _, w := range e.Warnings(f.ID) {
			f.Details = append(f.Details, strings.Split(strings.TrimSpace(w.Error()), "\n")...)
		}
		e.check(&f)
		if len(f.Details) > 0 {
			found = append(found, f)
		}
	}
	slices.SortStableFunc(found, func(f, g Finding) int {
		return cmp.Or(f.Severity.rank()-g.Severity.rank(), cmp.Compare(f.ID, g.ID))
	})
	return found
}

// findings has each finding: ID and severity, which its check can change, cause, and remedy. The last one
// reports what the checks of the others could not read.
//
//go:embed findings.txt
var findings string

// Findings returns each finding that Examine can return, without details.
func Findings() []Finding {
	var all []Finding
	for text := range strings.SplitSeq(strings.TrimSpace(findings), "\n\n") {
		lines := strings.Split(text, "\n")
		id, severity, _ := strings.Cut(lines[0], " ")
		all = append(all, Finding{ID: id, Severity: Severity(severity), Cause: lines[1], Remedy: lines[2]})
	}
	return all
}

// check adds the details of a finding. One that has no case has those that are warnings of a dry run alone.
func (e *examination) check(f *Finding) {
	switch f.ID {
	case "foreign-masquerade":
		f.addViolations(e.violations, false)
	case "foreign-masquerade-possible":
		f.addViolations(e.violations, true)
	case "two-unscoped-chains":
		overlappingChains(e, f)
	case "main-plugin-ipmasq":
		mainPluginMasquerade(e, f)
	case "duplicate-entry":
		duplicateEntries(e, f)
	case "unused-entry":
		unusedEntries(e, f)
	case "conflist-without-us":
		conflistWithoutEntry(e, f)
	case "conflist-absent":
		conflistAbsent(e, f)
	case "pod-network-not-exempt":
		podNetworksNotExempt(e, f)
	case "no-effect":
		networksWithoutHook(e, f)
	case "scope-matches-nothing":
		scopesWithoutMatch(e, f)
	case "agent-running":
		agentRunning(e, f)
	case "ebpf-masquerade":
		ebpfMasquerade(e, f)
	case "missing-capability":
		missingCapabilities(e, f)
	case "forwarding-off":
		forwardingOff(e, f)
	case "mixed-iptables":
		mixedVariants(e, f)
	case "saved-ruleset":
		savedRulesets(e, f)
	case "masquerade-source":
		masqueradeSources(e, f)
	case "output-address-subnet":
		connectedOutputs(e, f)
	case "node-port-overlap":
		nodePortOverlap(e, f)
	case "guard-notrack":
		untrackedPods(e, f)
	case "guard-accept":
		acceptedPods(e, f)
	case "reconciler-not-running":
		reconcilerNotRunning(e, f)
	case "reconciler-not-answering":
		reconcilerNotAnswering(e, f)
	case "pods-without-record":
		podsWithoutRecord(e, f)
	case "not-examined":
		f.Details = e.notExamined
	}
}

// note keeps an error for the finding not-examined.
func (e *examination) note(err error) {
	if err != nil && !slices.Contains(e.notExamined, err.Error()) {
		e.notExamined = append(e.notExamined, err.Error())
	}
}

func (e *examination) noteAs(what string, err error) {
	if err != nil {
		e.note(fmt.Errorf("%s: %w", what, err))
	}
}

const maxFile = 4 << 20 // bytes

// read returns the content of a file below the root, "" if there is none. It notes errors.
func (e *examination) read(path string) string {
	data, _, err := safefile.ReadFile(filepath.Join(e.Root, path), maxFile)
	if !errors.Is(err, fs.ErrNotExist) {
		e.note(err)
	}
	return string(data)
}

// readDir returns the entries of a directory below the root, none if it does not exist.
func (e *examination) readDir(path string) []os.DirEntry {
	entries, err := os.ReadDir(filepath.Join(e.Root, path))
	if !errors.Is(err, fs.ErrNotExist) {
		e.note(err)
	}
	return entries
}

// hasChoice reports whether owned chains are kept in a backend and, unless it is "", in that variant.
func (e *examination) hasChoice(backend policy.Backend, variant string) bool {
	for _, c := range e.Rules.Chains {
		isVariant := variant == "" || c.Choice.Variant == variant
		if c.Choice.Backend == backend && isVariant {
			return true
		}
	}
	return false
}
