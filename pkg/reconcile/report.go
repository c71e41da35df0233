// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Result is the outcome of a sync, as the metric reconciles_total has it.
type Result string

// The results of syncs.
const (
	Unchanged Result = "unchanged" // everything was correct, nothing was written
	Repaired  Result = "repaired"  // rules differed from what had been written before
	Changed   Result = "changed"   // documents changed, or rules that had not been written before
	Failed    Result = "failed"    // something that had to be done could not be done
)

// Results returns all of them.
func Results() []Result { return []Result{Unchanged, Repaired, Changed, Failed} }

// Reason is why the node is not ready, as the metric not_ready, /readyz, the log and doctor have it.
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

	ReasonConflistStale Reason = "conflist-stale"
)

// Fault is a reason with what it means. docs/troubleshooting.md has a section for each, to which its alert leads.
type Fault struct {
	Reason Reason
	Cause  string // a sentence, also in the documents
	Remedy string
}

// Faults returns all of them.
func Faults() []Fault {
	return []Fault{
		{ReasonRules, "Rules differ, or may differ, from what the sources ask for.",
			"A reconciler that runs repairs the rules within a second. Without one, start it or run ip-masq-reconciler once. If another program wrote the chain, state another masqChain."},
		{ReasonState, "The dataDir or the directory of conflists cannot be used.",
			"Free space, make the directory writable, or state the right one in data_dir or cni_conf_dir and restart the reconciler. " +
				"If a newer version wrote the files, install that version again."},
		{ReasonSource, "A plugin entry, an agent file, reconciler.toml or plugin.toml is invalid.",
			"Correct the file, or in a cluster the ConfigMap. The reconciler reads it at once."},
		{ReasonConflict, "Two sources, or two directories as dataDir, conflict.",
			"State the same value in both sources, or remove it from one. State one dataDir everywhere, and run cleanup for the other one."},
		{ReasonConflist, "The plugin entry is missing, or every ADD fails because of it.",
			"Place the plugin entry behind the plugin that creates the interface; ip-masq-reconciler install inserts it there. " +
				"If another program removes it, change that program's settings."},
		{ReasonConflistStale, "ip-masq's own conflist is not a copy of the main CNI plugin's file as it is now.",
			"Start the reconciler, which updates the copy, or removes it with that file. If that file is broken, correct it. On a node without ip-masq, remove the copy."},
		{ReasonPlugin, "The plugin's binary is missing or not executable.",
			"Run ip-masq-reconciler install. In a cluster, delete this node's pod of ip-masq, whose init container installs the plugin."},
		{ReasonBackend, "A program, a part of the kernel or a capability is missing.",
			"Install the program, load the modules or add the capability. Or set backend to \"nftables\", which needs no program."},
		{ReasonStandby, "Another reconciler runs on the node.",
			"Stop one of the two: the service of the host, or the pod."},
		{ReasonFlapping, "Another program reverts the rules repeatedly.",
			"Stop that program, or configure it so that it does not change the chain. Then run ip-masq-reconciler once."},
		{ReasonAddress, "The node has no usable address in outputAddresses.",
			"Configure an address of the list on the node, or add a prefix to outputAddresses that contains one of its addresses."},
	}
}

// Problem is one cause of a node that is not ready. In JSON, Err is its message.
type Problem struct {
	Reason  Reason          `json:"reason"`
	Source  policy.SourceID `json:"source,omitzero"` // whose policy is not in force
	Chain   string          `json:"chain,omitempty"` // of a problem with rules or a conflict
	Err     error           `json:"-"`
	Waiting bool            `json:"-"` // for something that is expected to come by itself
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
// is not in force.
func (p Problem) aboutRules() bool { return p.Source == (policy.SourceID{}) && p.failure() }

// failure reports whether something could not be read or written, rather than that it is invalid.
func (p Problem) failure() bool {
	return p.Reason == ReasonRules || p.Reason == ReasonState || p.Reason == ReasonBackend
}

// Report is the result of a sync or of a dry run.
type Report struct {
	Started time.Time
	Took    time.Duration
	Result  Result

	Problems []Problem // in the order in which they were found
	Warnings []error   // worth an operator's attention; they stop nothing

	Sources *Sources
	State   store.State
	inputs  string // digest of what State was decoded from; see enforce.Enforcer.Inputs
	// generation is one from before Rules were read, zero if it is unknown.
	generation netfilter.Generation
	Stored     []policy.Source // what Rules is computed from: the documents, with the sources' changes in a dry run
	Rules      *enforce.State  // after the sync; nil if the documents cannot be read
	Before     *enforce.State  // before the sync wrote, with the counters of that time; nil if it wrote nothing

	Drift   policy.Diff // what other programs changed in rules that had been written before
	By      Writer      // the last program that changed rules before the sync, if known
	Pending []policy.SourceID
	Applied []policy.SourceID // sources whose policy the sync applied; Pending are the others that changed
	Dropped []policy.SourceID // networks that are unused and are, or would be, removed

	Lost         []Problem // damaged documents that no source restores: the desired rules are unknown
	OtherDataDir error     // why nothing may be written: the dataDir is not the node's

	Conflist *conflist.Status // nil unless a loop syncs the conflist; Inserted is since the report before
}

// Ready reports whether the rules are what the sources ask for.
func (r *Report) Ready() bool { return len(r.Problems) == 0 }

// WarningsOf returns the warnings that the finding ID of doctor has; for "", those that none has.
func (r *Report) WarningsOf(id string) (found []error) {
	for _, w := range r.Warnings {
		var of FindingWarning
		if errors.As(w, &of); of.ID == id {
			found = append(found, w)
		}
	}
	return found
}

// Standby reports whether no sync was made because another reconciler is active.
func (r *Report) Standby() bool {
	return slices.ContainsFunc(r.Problems, func(p Problem) bool { return p.Reason == ReasonStandby })
}

// Summary names the managed chains with their backends in one line.
func (r *Report) Summary() string {
	var chains []string
	if r.Rules != nil {
		for _, chain := range r.Rules.Chains {
			for _, c := range chain.Desired.Chains {
				chains = append(chains, fmt.Sprintf("%s (%s, %s, %d rules)", c.Name, c.Family, chain.Choice, len(c.Rules)))
			}
		}
	}
	return strings.Join(chains, ", ")
}

// Differs reports whether rules in the kernel are not what the sources ask for.
func (r *Report) Differs() bool { return r.Rules != nil && r.OtherDataDir == nil && r.Rules.Differs() }

// Incomplete returns why the desired rules are unknown, or nil: a newer version wrote documents, or they are damaged and
// no source restores them.
func (r *Report) Incomplete() error {
	errs := []error{r.unknown()}
	for _, p := range r.Lost {
		errs = append(errs, p.Err)
	}
	return errors.Join(errs...)
}

// unknown is Incomplete without damaged documents, beside which a sync writes what cannot be theirs.
func (r *Report) unknown() error {
	return newer(r.State)
}

// Obstacles returns the problems without the differences that a sync would repair.
func (r *Report) Obstacles() []Problem {
	return slices.DeleteFunc(slices.Clone(r.Problems), func(p Problem) bool { return isDrift(p.Err) })
}

// Unfinished reports whether a sync has something to write.
func (r *Report) Unfinished() bool {
	if r.unknown() != nil || r.OtherDataDir != nil {
		return false
	}
	return len(r.Pending)+len(r.Dropped) > 0 || r.Rules != nil && !r.Rules.InSync()
}

// verified reports whether the sync found all rules as the documents ask for, and wrote nothing.
func (r *Report) verified() bool {
	return r.Result == Unchanged && r.Rules != nil && r.Rules.InSync() && len(r.Rules.OtherDataDirs) == 0 && !r.Unfinished() && !r.rulesFailed() &&
		r.Incomplete() == nil
}

// sameOutstanding reports whether a dry run would write only what the last sync failed to write.
func (r *Report) sameOutstanding(last *Report) bool {
	return (!r.Ready() || r.Unfinished()) && (last.Rules == nil || r.outstanding() == last.outstanding())
}

func (r *Report) outstanding() string {
	if r.Rules == nil {
		return ""
	}
	s := r.Rules
	return fmt.Sprintln(s.Diff(), s.Stale, s.Duplicates, s.OtherDataDirs, r.Pending, r.Dropped, r.State.Damaged)
}

// rulesFailed reports whether rules are not what the documents in force ask for.
func (r *Report) rulesFailed() bool {
	return r.OtherDataDir != nil || slices.ContainsFunc(r.Problems, Problem.aboutRules)
}

// failed reports whether something is to be tried again: rules, or a policy that could not be applied.
func (r *Report) failed() bool {
	return r.OtherDataDir != nil || slices.ContainsFunc(r.Problems, Problem.failure)
}

// reverted reports whether the sync failed only because another program changed the rules again
// before they were verified.
func (r *Report) reverted() bool {
	other := func(p Problem) bool {
		return p.failure() && (!isDrift(p.Err) || len(r.Drift) == 0) && !errors.Is(p.Err, netfilter.ErrChanged)
	}
	return r.failed() && !slices.ContainsFunc(r.Problems, other)
}

// dependsOnAddresses reports whether a policy chooses among the node's addresses.
func (r *Report) dependsOnAddresses() bool {
	return r.Rules != nil && r.Rules.DependsOnAddresses()
}

func isDrift(err error) bool {
	var drift *enforce.DriftError
	return errors.As(err, &drift)
}

// isDiskFault reports whether an error is that of a file system which is full, read-only or broken.
func isDiskFault(err error) bool {
	return slices.ContainsFunc([]error{unix.ENOSPC, unix.EDQUOT, unix.EROFS, unix.EIO}, func(e error) bool { return errors.Is(err, e) })
}

// add reports a problem. Where the source itself is valid, the reason is that of the cause.
func (r *Report) add(p Problem) {
	var conflict *policy.ConflictError
	var unwritable *enforce.UnwritableError
	ofSource := p.Source != policy.SourceID{} || p.Reason == ReasonSource
	switch {
	case ofSource && (errors.As(p.Err, &unwritable) || isDiskFault(p.Err)):
		p.Reason = ReasonState
	case p.Source != policy.SourceID{} && errors.As(p.Err, &conflict):
		p.Reason = ReasonConflict
	case p.Reason == ReasonRules && (errors.Is(p.Err, netfilter.ErrUnusable) || errors.Is(p.Err, fs.ErrPermission)):
		p.Reason = ReasonBackend // a program or a capability is missing
	}
	r.Problems = append(r.Problems, p)
}

func (r *Report) problem(reason Reason, err error) { r.add(Problem{Reason: reason, Err: err}) }

func (r *Report) sourceProblem(s policy.SourceID, err error) {
	r.add(Problem{Reason: ReasonSource, Source: s, Err: err})
}

func (r *Report) chainProblem(reason Reason, chain, format string, args ...any) {
	r.add(Problem{Reason: reason, Chain: chain, Err: fmt.Errorf(format, args...)})
}

func (r *Report) warn(err error) {
	if err != nil && !slices.ContainsFunc(r.Warnings, func(w error) bool { return w.Error() == err.Error() }) {
		r.Warnings = append(r.Warnings, err)
	}
}

// planned takes over what a plan says, in place of what one before it said.
func (r *Report) planned(p plan) {
	r.Problems, r.Pending, r.Dropped, r.Lost = nil, nil, p.dropped, p.lost
	for _, c := range p.Changed {
		r.Pending = append(r.Pending, c.ID)
	}
	for _, problem := range p.problems {
		r.add(problem)
	}
	for _, w := range p.warnings {
		r.warn(w)
	}
}

// addProblems adds the problems of the sources, the documents and the rules to the report.
func (n *Node) addProblems(ctx context.Context, r *Report) {
	n.addSourceProblems(r)
	r.Problems = append(r.Problems, r.Lost...)
	if err := newer(r.State); err != nil {
		r.problem(ReasonState, err)
	} else if r.OtherDataDir != nil {
		r.problem(ReasonState, r.OtherDataDir)
	} else if r.Rules != nil {
		n.addRuleProblems(ctx, r)
	}
	if r.rulesFailed() {
		r.Result = Failed
	}
	r.Took = time.Since(r.Started)
}

func (n *Node) addSourceProblems(r *Report) {
	s := r.Sources
	if n.SettingsErr != nil {
		r.problem(ReasonSource, fmt.Errorf("settings: %w", n.SettingsErr))
	}
	if s.PluginFileErr != nil {
		r.problem(ReasonSource, fmt.Errorf("%w (until it is corrected, no pod can start, and the policies in force stay)", s.PluginFileErr))
	} else if where := n.Settings.Origins["cni_conf_dir"]; s.PluginFile.Present && n.Settings.CNIConfDir != s.PluginFile.CNIConfDir &&
		where != "" && where != s.PluginFile.Path {
		r.problem(ReasonSource, fmt.Errorf("cni_conf_dir: %s (%s) is not that of %s, %s, which is in force; remove it",
			policy.Quote(n.Settings.CNIConfDir), where, policy.Printable(s.PluginFile.Path), policy.Quote(s.PluginFile.CNIConfDir)))
	}
	if s.ConfDirErr != nil && !errors.Is(s.ConfDirErr, fs.ErrNotExist) {
		r.problem(ReasonState, fmt.Errorf("%w; set cni_conf_dir to the directory that the runtime reads, or repair this one", s.ConfDirErr))
	}
	for _, list := range s.ConfDir.Conflists {
		if list.Err == nil {
			continue
		}
		// An unreadable conflist matters if it may be that of a network whose policy is in force.
		i := slices.IndexFunc(r.State.Sources, func(c policy.Source) bool {
			mayBe := list.Network == "" || list.Network == c.ID.Name
			return c.ID.Kind == policy.Network && mayBe && !s.ConfDir.HasEntry(c.ID.Name)
		})
		if i < 0 {
			r.warn(FindingWarning{list.Err, "conflist-broken"})
			continue
		}
		id := r.State.Sources[i].ID
		r.sourceProblem(id, fmt.Errorf("%s: the last good policy from its conflist stays in force: %w", id, list.Err))
	}
}

func (n *Node) addRuleProblems(ctx context.Context, r *Report) {
	s := r.Rules
	if s.RecordErr != nil {
		r.problem(ReasonState, s.RecordErr)
	}
	for _, p := range s.Policies() {
		addChainProblems(r, p)
	}
	e := n.Enforcer(r.Sources, r.warn)
	stuck := slices.DeleteFunc(slices.Clone(r.State.Record.Chains), func(o store.OwnedChain) bool { return !o.Stuck })
	for _, o := range stuck {
		if err := e.CanRemove(ctx, o); err != nil {
			r.chainProblem(ReasonRules, o.Chain, "chain %s (%s) in %s is stale and cannot be removed: %w", o.Chain, o.Family, o.Backend, err)
		} else {
			r.chainProblem(ReasonRules, o.Chain, "chain %s (%s): failed to remove the stale chain from %s; "+
				"see the warnings, or remove it by hand", o.Chain, o.Family, o.Backend)
		}
	}
	for _, at := range s.Duplicates {
		if slices.ContainsFunc(stuck, func(o store.OwnedChain) bool { return o.Chain == at.Chain && o.Backend == at.Choice.Backend }) {
			continue // reported
		}
		r.chainProblem(ReasonRules, at.Chain, "chain %s also exists in %s, which may masquerade what the policy exempts: "+
			"it is removed if it holds nothing but RETURN and MASQUERADE rules", at.Chain, at.Choice)
	}
	for _, o := range s.OtherDataDirs {
		r.chainProblem(ReasonConflict, o.Chain, "%s belongs to another dataDir; remove it with ip-masq-reconciler cleanup --data-dir %s",
			o, policy.Quote(o.Owner.DataDir))
	}
	if guardErr := s.Guard.Err; guardErr != nil && !slices.ContainsFunc(r.Problems, func(p Problem) bool { return errors.Is(p.Err, guardErr) }) {
		r.problem(ReasonRules, guardErr) // of a guard that was to be removed
	}
	for _, e := range s.NoOutputs() {
		r.add(Problem{Reason: ReasonAddress, Chain: e.Chain, Err: e})
	}
	for _, e := range s.AmbiguousOutputs() {
		r.warn(FindingWarning{e, "output-address-ambiguous"})
	}
	for _, slow := range s.LinearChains() {
		r.warn(FindingWarning{slow, "slow-list"})
	}
	for _, i := range s.Guard.Inactive {
		r.warn(FindingWarning{i, "guard-inactive"})
	}
}

func addChainProblems(r *Report, p policy.Policy) {
	for _, c := range p.Conflicts.Summary() {
		r.add(Problem{Reason: ReasonConflict, Chain: p.Chain, Err: c})
	}
	err := r.Rules.Err(p.Chain)
	if err == nil || errors.Is(err, r.Rules.RecordErr) {
		return
	}
	r.add(Problem{Reason: ReasonRules, Chain: p.Chain, Err: err})
	// What keeps rules from being repaired is a fault of its own.
	if diff := r.Rules.ChainDiff(r.Rules.Find(p.Chain)); len(diff) > 0 && r.Problems[len(r.Problems)-1].Reason == ReasonBackend {
		r.add(Problem{Reason: ReasonRules, Chain: p.Chain, Err: &enforce.DriftError{Diff: diff}})
	}
}

// addBackendProblems adds chains that are correct and whose repair would fail, such as those in iptables
// when the image has no iptables. The sync has not failed because of that.
func (n *Node) addBackendProblems(ctx context.Context, r *Report) {
	if r.Rules == nil || r.Result == Failed {
		return
	}
	e := n.Enforcer(r.Sources, r.warn)
	for i := range r.Rules.Chains {
		if err := e.CanWrite(ctx, &r.Rules.Chains[i]); err != nil {
			r.chainProblem(ReasonRules, r.Rules.Chains[i].Policy.Chain, "the rules are correct, but a repair would fail: %w", err)
		}
	}
}

// AddReadiness adds to what Check found why ADDs fail and why rules cannot be repaired: all that an active reconciler
// reports and that needs no history of syncs.
func (n *Node) AddReadiness(ctx context.Context, r *Report) {
	n.addBackendProblems(ctx, r)
	n.addRepairProblems(ctx, r)
	n.AddADDProblems(r)
	n.AddStaleConflist(r)
}

// addRepairProblems adds why rules that differ cannot be repaired, as a dry run of the repair finds it.
func (n *Node) addRepairProblems(ctx context.Context, r *Report) {
	if !r.Differs() {
		return
	}
	wait, cancel := context.WithTimeout(ctx, n.LockWait)
	defer cancel()
	lock, err := n.Dir.DryRun(wait)
	if err != nil { // AddADDProblems says it
		return
	}
	defer func() { r.warn(lock.Release()) }()
	e := n.Enforcer(r.Sources, r.warn)
	after := e.Sync(ctx, e.ObserveAgain(ctx, r.Rules), lock)
	for _, c := range after.Chains {
		if err := after.Err(c.Policy.Chain); err != nil && after.RecordErr == nil && r.Rules.Find(c.Policy.Chain).Err == nil {
			r.chainProblem(ReasonRules, c.Policy.Chain, "%w", err)
		}
	}
}

// AddADDProblems adds why ADDs fail although the rules are correct.
func (n *Node) AddADDProblems(r *Report) {
	var file string
	for _, list := range r.Sources.ConfDir.Conflists {
		if err := list.PositionErr(); err != nil {
			r.problem(ReasonConflist, err)
		}
		for _, e := range list.Entries {
			file = cmp.Or(file, list.File)
			if e.Err == nil && e.Entry.RequireAgentConfig && r.Rules != nil && r.State.Find(policy.SourceID{Kind: policy.AgentFiles}) == nil {
				r.problem(ReasonConflist, fmt.Errorf("%s: plugins[%d]: requireAgentConfig: no policy of the agent files "+
					"is stored, so no pod can start: set agent_config_dir, correct the agent files, or remove the key", policy.Printable(list.File), e.Index))
			}
		}
	}
	if err := config.CheckPlugin(n.Settings.CNIBinDir); err != nil && file != "" {
		r.problem(ReasonPlugin, fmt.Errorf("%w, but %s names it, so no pod can start: run \"ip-masq-reconciler install\", "+
			"or in Kubernetes delete this node's pod of ip-masq, whose init container does; or set cni_bin_dir to the runtime's plugin directory", err, policy.Printable(file)))
	}
	n.AddDiskProblem(r)
}

// AddDiskProblem adds that the dataDir is full or read-only, which fails ADDs although the rules are correct.
func (n *Node) AddDiskProblem(r *Report) {
	hasEntry := func(list config.Conflist) bool { return len(list.Entries) > 0 }
	known := func(p Problem) bool { return isDiskFault(p.Err) }
	if !slices.ContainsFunc(r.Sources.ConfDir.Conflists, hasEntry) && len(r.Stored) == 0 || slices.ContainsFunc(r.Problems, known) {
		return
	}
	if err := n.Dir.CheckWritable(); isDiskFault(err) {
		r.problem(ReasonState, fmt.Errorf("%w; until then pods of a new or changed network cannot start, "+
			"nor is any rule written after a reboot", err))
	}
}

// AddStaleConflist adds that ip-masq's own conflist is stale. In a loop with a conflist manager, that does.
func (n *Node) AddStaleConflist(r *Report) {
	known := func(p Problem) bool { return p.Reason == ReasonConflistStale }
	if err := config.ReadOwnConflist(n.Dir.OwnConflistPath()).Stale(r.Sources.ConfDir); err != nil && !slices.ContainsFunc(r.Problems, known) {
		r.problem(ReasonConflistStale, err)
	}
}

// otherDataDir reports why the dataDir must not be used: it is not the node's.
func (n *Node) otherDataDir(src *Sources, err error) *Report {
	r := &Report{Started: time.Now(), Result: Failed, Sources: src, OtherDataDir: err}
	for _, list := range src.ConfDir.Conflists {
		if err := list.DataDirErr(src.PluginFile, n.Dir.Path()); err != nil {
			r.problem(ReasonConflist, err)
		}
	}
	r.problem(ReasonState, err)
	return r
}

// newer returns an error if a newer version wrote documents.
func newer(s store.State) error {
	if len(s.Newer) == 0 {
		return nil
	}
	return fmt.Errorf("%w, of the reconciler and the plugin: nothing is repaired until then", s.Newer[0].Err)
}
