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
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

var (
	// errNotReady ends status after it has printed why the node is not ready.
	errNotReady = errors.New("not ready")
	errNoneRuns = errors.New("no reconciler runs on this node")
)

func (a *app) statusCommand() *cobra.Command {
	return a.addOutput(&cobra.Command{
		Use:   "status",
		Short: "Show on one screen whether the node is ready, and why not",
		Long: `Show on one screen whether the node is ready, with cause and remedy of each fault. Show what is
in force: reconciler, plugin, settings, chains, sources, conflist, repairs, and the findings of
"doctor". Nothing is written. If no reconciler answers, the state is that of the dataDir and of
the kernel.

Exit codes: 0 the node is ready; 1 no reconciler runs, or error;
2 mistake in the command line; 3 the node is not ready.`,
		Example: `  # Show the state of this node
  ip-masq-reconciler status

  # Show it again every two seconds
  watch ip-masq-reconciler status

  # Show the state of a node of a cluster, by the pod of its DaemonSet
  kubectl -n kube-system exec ip-masq-x2x7k -- ip-masq-reconciler status`,
		Args: noArguments,
		RunE: a.status,
	})
}

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
	return cmp.Or(err, s.err())
}

// nodeStatus is the output of status as JSON.
type nodeStatus struct {
	Ready bool `json:"ready"` // as /readyz says, and the rules are right at this moment

	Reconciler   reconcilerStatus   `json:"reconciler"`
	Plugin       pluginStatus       `json:"plugin"`
	SettingsFrom string             `json:"settingsFrom"`
	Settings     []config.Setting   `json:"settings"`
	DataDir      string             `json:"dataDir"`
	Chains       []chainStatus      `json:"chains"`
	Sources      []sourceStatus     `json:"sources"`
	Pods         podsStatus         `json:"pods"`
	Conflist     conflistStatus     `json:"conflist"`
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
	metrics.ChainCount        // empty without an answer of the reconciler
	Backend            string `json:"backend"`
	Rules              int    `json:"rules"` // in the kernel

	Guard         policy.GuardMode `json:"guard,omitempty"`
	EnforceExempt bool             `json:"enforceExempt,omitempty"`
}

// sourceState is what is in force of a source.
type sourceState string

const (
	inForce    sourceState = "in force"
	superseded sourceState = "superseded" // by another source, in part at least
	pending    sourceState = "pending"    // the last good policy is in force
	invalid    sourceState = "invalid"    // the same
)

type sourceStatus struct {
	Source  policy.SourceID `json:"source"`
	State   sourceState     `json:"state"`
	Written time.Time       `json:"written,omitzero"` // when its policy last changed
	Files   []string        `json:"files"`            // that state it
}

type podsStatus struct {
	Recorded int `json:"recorded"`
	Exempt   int `json:"exempt"` // because of their namespaces
	// WithoutRecord are the attachments whose pods are not known.
	WithoutRecord int `json:"withoutRecord"`

	listed bool // nonMasqueradeNamespaces is in force
}

type conflistStatus struct {
	Network string `json:"network"` // that the runtime uses
	File    string `json:"file"`
	Entry   bool   `json:"entry"` // it has the plugin entry
	Error   string `json:"error,omitempty"`
	Managed bool   `json:"managed"`
}

// err returns the end of the command: its exit code tells whether the node is ready.
func (s *nodeStatus) err() error {
	switch {
	case !s.Reconciler.Running:
		return errNoneRuns
	case !s.Ready:
		return errNotReady
	}
	return nil
}

// nodeStatus asks the reconciler and observes the node.
func (a *app) nodeStatus(ctx context.Context) (*nodeStatus, error) {
	n, r, err := a.examine(ctx)
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 && errors.Is(n.active.err, fs.ErrPermission) {
		return nil, fmt.Errorf("only root can read the state of the node, in %s: run status as root", policy.Printable(n.Dir.Path()))
	}
	s := &nodeStatus{
		unread:       r.Rules == nil || r.Incomplete() != nil,
		Reconciler:   reconcilerStatus{activeReconciler: n.active},
		Plugin:       pluginStatus{Path: filepath.Join(n.Settings.CNIBinDir, config.PluginType)},
		SettingsFrom: n.settingsFrom, Settings: n.Settings.List(), DataDir: n.Dir.Path(),
		Sources: sourcesOf(n, r), Conflist: conflistOf(n.Settings), Repairs: []metrics.Repair{},
		Findings: n.findings(ctx, r),
	}
	if !n.usesPlugin(r, s.Plugin.Path) {
		if len(r.Sources.ConfDir.Conflists) == 0 {
			s.Conflist.Error = ""
		}
	} else if err := config.CheckPlugin(n.Settings.CNIBinDir); err != nil {
		s.Plugin.Error = err.Error()
	} else if s.Plugin.Version, err = n.pluginVersion(ctx, s.Plugin.Path); err != nil {
		s.Plugin.Error = err.Error()
	}
	s.add(n.active.status)
	s.Chains, s.Pods = chainsOf(r, n.active.status), podsOf(n, r)
	if n.active.Running && !n.active.Answers {
		s.Reconciler.Error = n.active.err.Error()
	}
	if !n.active.Running {
		s.Reconciler.LastSeen = n.Dir.ReconcilerSeen()
	}
	s.Ready = n.active.Answers && len(s.found(diagnose.SeverityFault)) == 0
	return s, nil
}

// usesPlugin reports whether the node has the plugin, or should. Without the plugin and a plugin entry, where the
// policy is that of agent files alone, the reconciler replaces an agent.
func (n *inspection) usesPlugin(r *reconcile.Report, path string) bool {
	_, err := os.Lstat(path)
	mayHaveEntry := func(l config.Conflist) bool { return l.Err != nil || len(l.Entries) > 0 }
	stored := r.State.Sources
	return !errors.Is(err, fs.ErrNotExist) || n.Settings.Conflist.Managed() ||
		slices.ContainsFunc(r.Sources.ConfDir.Conflists, mayHaveEntry) ||
		len(stored) != 1 || stored[0].ID.Kind != policy.AgentFiles
}

// add adds what only the reconciler that runs knows, if it answers.
func (s *nodeStatus) add(a *metrics.Status) {
	if a == nil {
		return
	}
	s.Reconciler.Started = a.Started
	s.Repairs, s.RepairsTotal = notNil(a.Repairs), a.RepairsTotal
	s.Conflist.Managed = a.ConflistManaged
}

func chainsOf(r *reconcile.Report, active *metrics.Status) []chainStatus {
	chains := []chainStatus{}
	if r.Rules == nil {
		return chains
	}
	for _, chain := range r.Rules.Chains {
		for _, c := range chain.Desired.Chains {
			at := policy.ChainFamily{Chain: c.Name, Family: c.Family}
			one := chainStatus{ChainCount: metrics.ChainCount{ChainFamily: at}, Backend: chain.Choice.String()}
			if observed := chain.Observed.Find(c.Family, c.Name); observed != nil {
				one.Rules = len(observed.Rules)
			}
			if guard := r.Rules.Guard.Of(at); guard != nil {
				one.Guard, one.EnforceExempt = guard.Mode, guard.Bound != nil
			}
			if active != nil {
				if i := slices.IndexFunc(active.Chains, func(c metrics.ChainCount) bool { return c.ChainFamily == at }); i >= 0 {
					one.ChainCount = active.Chains[i]
				}
			}
			chains = append(chains, one)
		}
	}
	return chains
}

// podsOf counts the pods. What cannot be read is a problem of the dry run.
func podsOf(n *inspection, r *reconcile.Report) (s podsStatus) {
	pods, without, _ := n.Dir.Pods()
	containers := map[string]bool{}
	for _, p := range pods {
		containers[p.ContainerID] = true
	}
	s.Recorded, s.WithoutRecord = len(containers), without
	if r.Rules != nil {
		policies := r.Rules.Policies()
		s.Exempt = r.Rules.ExemptPods(policies...)
		s.listed = slices.ContainsFunc(policies, func(p policy.Policy) bool { return len(p.Namespaces) > 0 })
	}
	return s
}

// sourcesOf returns the sources that are stored or should be.
func sourcesOf(n *inspection, r *reconcile.Report) []sourceStatus {
	states := map[policy.SourceID]sourceState{}
	for _, s := range r.State.Sources {
		states[s.ID] = inForce
	}
	if r.Rules != nil {
		for _, p := range r.Rules.Policies() {
			for _, c := range p.Conflicts {
				states[c.Superseded.Source] = superseded
			}
		}
	}
	for _, id := range r.Pending {
		states[id] = pending
	}
	for _, p := range r.Problems {
		switch {
		case p.Source == policy.SourceID{}:
		case p.Reason == reconcile.ReasonSource:
			states[p.Source] = invalid
		case p.Reason == reconcile.ReasonConflict:
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
		return mapped(agent.Names, func(name string) string { return filepath.Join(agent.Dir, name) })
	}
	return []string{}
}

func conflistOf(s config.Settings) conflistStatus {
	n, err := conflist.Find(s.CNIConfDir, s.Conflist.Network)
	c := conflistStatus{Network: n.Name, File: n.Path, Entry: n.Entries > 0, Managed: s.Conflist.Managed()}
	if err != nil {
		c.Error = err.Error()
	} else if c.File == "" {
		c.Error = fmt.Sprintf("the configuration of network %s is unknown", policy.Quote(n.Name))
	}
	return c
}
