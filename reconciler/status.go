// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist/install"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

func (a *app) status(c *cobra.Command, _ []string) error {
	s, err := a.nodeStatus(c.Context())
	switch {
	case err != nil:
		return err
	case a.json():
		err = a.print(s)
	default:
		_, err = io.WriteString(a.out, wrapped(s.text(time.Now()), terminalWidth(os.Stdout), labelWidth))
	}
	switch { // the exit code tells whether the node is ready
	case err != nil:
		return err
	case !s.Reconciler.Running:
		return errors.New("no reconciler runs on this node")
	case !s.Ready:
		return errDrift
	}
	return nil
}

type nodeStatus struct {
	Ready        bool               `json:"ready"` // as /readyz says, and the rules are right at this moment
	Reconciler   reconcilerStatus   `json:"reconciler"`
	Plugin       pluginStatus       `json:"plugin"`
	SettingsFrom string             `json:"settingsFrom"`
	Settings     []config.Setting   `json:"settings"`
	DataDir      string             `json:"dataDir"`
	Chains       []chainStatus      `json:"chains"`
	Programs     []programStatus    `json:"programs"` // of iptables, for the chains
	Sources      []sourceStatus     `json:"sources"`
	Pods         podsStatus         `json:"pods"`
	Conflist     conflistStatus     `json:"conflist"`
	BootUnit     bootUnitStatus     `json:"bootUnit"`
	Repairs      []metrics.Repair   `json:"repairs"` // the latest ones, the newest first
	RepairsTotal int                `json:"repairsTotal"`
	Findings     []diagnose.Finding `json:"findings"` // why the node is not ready, and the others of doctor

	unread bool // not all documents could be read
}

type reconcilerStatus struct {
	activeReconciler
	Error    string    `json:"error,omitempty"`   // why one that runs does not answer
	LastSeen time.Time `json:"lastSeen,omitzero"` // without one that runs: when one last made a sync
	Started  time.Time `json:"started,omitzero"`
}

type pluginStatus struct {
	Path    string `json:"path"`
	Version string `json:"version,omitempty"`
	Error   string `json:"error,omitempty"` // why the runtime cannot run it
}

type chainStatus struct {
	metrics.ChainCount                  // empty without an answer of the reconciler
	Backend            string           `json:"backend"`
	Rules              int              `json:"rules"` // in the kernel
	Guard              policy.GuardMode `json:"guard,omitempty"`
	EnforceExempt      bool             `json:"enforceExempt,omitempty"`
}

type programStatus struct {
	Backend string        `json:"backend"`
	Family  policy.Family `json:"family"`
	Path    string        `json:"path,omitempty"`
	Version string        `json:"version,omitempty"`
	Error   string        `json:"error,omitempty"` // why there is no version
}

type sourceStatus struct {
	Source  policy.SourceID `json:"source"`
	State   string          `json:"state"`            // see sourcesOf
	Written time.Time       `json:"written,omitzero"` // when its policy last changed
	Files   []string        `json:"files"`            // that state it
}

type podsStatus struct {
	Recorded      int `json:"recorded"`
	Exempt        int `json:"exempt"`        // because of their namespaces
	WithoutRecord int `json:"withoutRecord"` // attachments whose pods are not known

	listed bool // nonMasqueradeNamespaces is in force
}

type conflistStatus struct {
	Network string `json:"network"` // that the runtime uses
	File    string `json:"file"`
	Entry   bool   `json:"entry"` // it has the plugin entry
	Error   string `json:"error,omitempty"`
	Managed bool   `json:"managed"`
}

type bootUnitStatus struct {
	Path string    `json:"path,omitempty"` // of the unit; "" if there is none, or none that this process sees
	Ran  time.Time `json:"ran,omitzero"`   // in this boot
}

func (a *app) nodeStatus(ctx context.Context) (*nodeStatus, error) {
	n, r, err := a.examine(ctx)
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 && errors.Is(n.active.err, fs.ErrPermission) {
		const onlyRoot = "only root can read the state of the node, in %s: run status as root"
		return nil, fmt.Errorf(onlyRoot, policy.Printable(n.Dir.Path()))
	}
	rules, active := cmp.Or(r.Rules, &enforce.State{}), cmp.Or(n.active.status, &metrics.Status{})
	s := &nodeStatus{
		unread:       r.Rules == nil || r.Incomplete() != nil,
		Reconciler:   n.reconcilerStatus(),
		Plugin:       n.pluginStatus(ctx, r),
		SettingsFrom: n.settingsFrom, Settings: n.Settings.List(), DataDir: n.Dir.Path(),
		Chains:   chainsOf(rules, active.Chains),
		Programs: programsOf(ctx, n.Drivers, rules),
		Sources:  sourcesOf(n, r, rules),
		Pods:     podsOf(n, r, rules),
		Conflist: n.conflistStatus(r),
		BootUnit: bootUnitStatus{install.FindBootUnit(n.Dir.BootUnitDir()), n.Dir.BootUnitRan()},
		Repairs:  notNil(active.Repairs), RepairsTotal: active.RepairsTotal,
		Findings: n.findings(ctx, r),
	}
	s.Ready = n.active.Answers && len(s.found(diagnose.SeverityFault)) == 0
	return s, nil
}

func (n *inspection) reconcilerStatus() reconcilerStatus {
	s := reconcilerStatus{activeReconciler: n.active}
	switch {
	case n.active.Answers:
		s.Started = n.active.status.Started
	case n.active.Running:
		s.Error = n.active.err.Error()
	default:
		s.LastSeen = n.Dir.ReconcilerSeen()
	}
	return s
}

// usesPlugin reports whether the node uses the plugin, or manages its entry.
func (n *inspection) usesPlugin(r *reconcile.Report) bool {
	host := diagnose.Host{BinDir: n.Settings.CNIBinDir, ConfDir: r.Sources.ConfDir, State: r.State}
	return n.Settings.Conflist.Manage || host.UsesPlugin()
}

func (n *inspection) pluginStatus(ctx context.Context, r *reconcile.Report) pluginStatus {
	s := pluginStatus{Path: filepath.Join(n.Settings.CNIBinDir, config.PluginType)}
	if !n.usesPlugin(r) {
		return s
	}
	err := config.CheckPlugin(n.Settings.CNIBinDir)
	if err == nil {
		s.Version, err = n.pluginVersion(ctx, s.Path)
	}
	if err != nil {
		s.Error = err.Error()
	}
	return s
}

func (n *inspection) conflistStatus(r *reconcile.Report) conflistStatus {
	used, err := conflist.Find(n.Settings.CNIConfDir, n.Settings.Conflist.Network)
	s := conflistStatus{
		Network: used.Name, File: used.Path, Entry: used.Entries > 0, Managed: n.Settings.Conflist.Manage,
	}
	if n.active.Answers {
		s.Managed = n.active.status.ConflistManaged
	}
	if err != nil && n.usesPlugin(r) {
		s.Error = err.Error()
	}
	return s
}

func chainsOf(rules *enforce.State, counted []metrics.ChainCount) []chainStatus {
	chains, counts := []chainStatus{}, map[policy.ChainFamily]metrics.ChainCount{}
	for _, c := range counted {
		counts[c.ChainFamily] = c
	}
	for _, chain := range rules.Chains {
		for _, c := range chain.Desired.Chains {
			at := policy.ChainFamily{Chain: c.Name, Family: c.Family}
			count := counts[at]
			count.ChainFamily = at // also of a chain that was not counted
			one := chainStatus{ChainCount: count, Backend: chain.Choice.String()}
			if observed := chain.Observed.Find(c.Family, c.Name); observed != nil {
				one.Rules = len(observed.Rules)
			}
			if guard := rules.Guard.Of(at); guard != nil {
				one.Guard, one.EnforceExempt = guard.Mode, guard.Bound != nil
			}
			chains = append(chains, one)
		}
	}
	return chains
}

// programsOf returns the programs that this process finds for the backends of the chains.
func programsOf(ctx context.Context, drivers netfilter.Drivers, rules *enforce.State) []programStatus {
	programs := []programStatus{}
	var asked []netfilter.Choice
	for _, c := range rules.Chains {
		if slices.Contains(asked, c.Choice) {
			continue
		}
		asked = append(asked, c.Choice)
		for _, p := range drivers.Programs(ctx, c.Choice) {
			s := programStatus{Backend: c.Choice.String(), Family: p.Family, Path: p.Path, Version: p.Version}
			if p.Err != nil {
				s.Error = p.Err.Error()
			}
			programs = append(programs, s)
		}
	}
	return programs
}

func podsOf(n *inspection, r *reconcile.Report, rules *enforce.State) podsStatus {
	pods, without, _ := n.Dir.Pods() // the error is a problem of the dry run
	containers := map[string]bool{}
	for _, p := range pods {
		containers[p.ContainerID] = true
	}
	policies := rules.Policies()
	s := podsStatus{
		Recorded: len(containers), Exempt: rules.CountExemptPods(policies...), WithoutRecord: without,
	}
	s.listed = listsNamespaces(policies)
	if s.listed {
		s.WithoutRecord += len(n.unrecordedPods(r))
	}
	return s
}

func listsNamespaces(policies []policy.Policy) bool {
	for _, p := range policies {
		if len(p.Namespaces) > 0 {
			return true
		}
	}
	return false
}

func sourcesOf(n *inspection, r *reconcile.Report, rules *enforce.State) []sourceStatus {
	const inForce, superseded = "in force", "superseded" // by another source, in part at least
	const pending, invalid = "pending", "invalid"        // the last good policy is in force
	states := map[policy.SourceID]string{}
	for _, s := range r.State.Sources {
		states[s.ID] = inForce
	}
	for _, p := range rules.Policies() {
		for _, c := range p.Conflicts {
			states[c.Superseded.Source] = superseded
		}
	}
	for _, id := range r.Pending {
		states[id] = pending
	}
	for _, p := range r.Problems {
		isOfSource := p.Source != policy.SourceID{}
		if isOfSource && p.Reason == reconcile.ReasonSource {
			states[p.Source] = invalid
		}
		if isOfSource && p.Reason == reconcile.ReasonConflict {
			states[p.Source] = superseded
		}
	}
	sources := []sourceStatus{}
	for id, state := range states {
		written, _ := n.Dir.Written(id) // zero if unknown
		sources = append(sources, sourceStatus{id, state, written, filesOf(id, r)})
	}
	slices.SortFunc(sources, func(a, b sourceStatus) int { return a.Source.Compare(b.Source) })
	return sources
}

// filesOf returns the files that state the policy of a source: the conflist, or the agent files.
func filesOf(id policy.SourceID, r *reconcile.Report) []string {
	list, agent := r.Sources.ConfDir.WithEntry(id.Name), r.Sources.Agent
	switch {
	case id.Kind == policy.Network && list != nil:
		return []string{list.File}
	case id.Kind == policy.AgentFiles && agent != nil:
		files := []string{}
		for _, name := range agent.Names {
			files = append(files, filepath.Join(agent.Dir, name))
		}
		return files
	}
	return []string{}
}
