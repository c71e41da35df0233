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
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

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

func (s bootUnitStatus) text() string {
	const format = "2006-01-02 15:04:05 MST"
	switch {
	case s.Path == "" && s.Ran.IsZero():
		return "not installed"
	case s.Ran.IsZero():
		return policy.Printable(s.Path) + ", did not run in this boot"
	case s.Path == "":
		return "ran in this boot at " + s.Ran.UTC().Format(format)
	}
	return policy.Printable(s.Path) + ", ran in this boot at " + s.Ran.UTC().Format(format)
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
			one := chainStatus{ChainCount: counts[at], Backend: chain.Choice.String()}
			one.ChainFamily = at
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
	s := podsStatus{Recorded: len(containers), Exempt: rules.ExemptPods(policies...), WithoutRecord: without}
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

const labelWidth = 13 // of the column of labels

type screen struct{ strings.Builder }

func (s *screen) row(label, text string) {
	text = strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n"+strings.Repeat(" ", labelWidth))
	fmt.Fprintf(s, "%-12s %s\n", label, text)
}

func (s *nodeStatus) text(now time.Time) string {
	w := &screen{}
	s.writeNode(w)
	s.writeProblems(w)
	w.row("Reconciler:", s.Reconciler.text(now))
	plugin := cmp.Or(s.Plugin.Error, "not used")
	if s.Plugin.Version != "" {
		plugin = s.Plugin.Version + ", " + policy.Printable(s.Plugin.Path)
	}
	w.row("Plugin:", plugin)
	w.row("Settings:", s.settingsText())
	dataDir := policy.Printable(s.DataDir)
	if i := slices.IndexFunc(s.Settings, func(x config.Setting) bool { return x.Key == "data_dir" }); i >= 0 {
		dataDir += " (" + policy.Printable(s.Settings[i].Origin) + ")"
	}
	w.row("Data dir:", dataDir)
	s.writeChains(w)
	s.writeSources(w, now)
	if s.Pods != (podsStatus{}) {
		w.row("Pods:", s.Pods.text())
	}
	w.row("Conflist:", s.Conflist.text())
	w.row("Boot unit:", s.BootUnit.text())
	w.row("Repairs:", s.repairsText(now))
	w.row("Doctor:", s.doctorText())
	return w.String()
}

func (s podsStatus) text() string {
	text := fmt.Sprint(s.Recorded)
	if s.listed {
		text += fmt.Sprintf(", of which %d exempt by namespace", s.Exempt)
	}
	if s.WithoutRecord > 0 {
		text += fmt.Sprintf("; attachments without a record: %d", s.WithoutRecord)
	}
	return text
}

// settingsText returns where the settings come from, and those that are not the defaults.
func (s *nodeStatus) settingsText() string {
	defaults := map[string]string{}
	for _, d := range config.DefaultSettings().List() {
		defaults[d.Key] = d.Value
	}
	text := s.SettingsFrom
	for _, x := range s.Settings {
		value, isKey := defaults[x.Key]
		isDefault := x.Origin == config.DefaultOrigin || isKey && value == x.Value
		if isDefault || x.Key == "data_dir" { // which has a row of its own
			continue
		}
		shown := policy.Printable(cmp.Or(x.Value, "none"))
		text += fmt.Sprintf("\n%s = %s (%s)", x.Key, shown, policy.Printable(x.Origin))
	}
	return text
}

func (s *nodeStatus) writeNode(w *screen) {
	faults, found := s.found(diagnose.SeverityFault), s.found(diagnose.SeverityProblem)
	headline := "ready"
	switch {
	case !s.Reconciler.Running:
		headline = "not ready: no reconciler runs"
	case len(faults) > 0:
		headline = "not ready: " + idsOf(faults)
	case !s.Reconciler.Answers:
		headline = "not ready: the reconciler does not answer"
	case len(found) > 0:
		headline = "ready, but doctor finds " + idsOf(found)
	}
	w.row("Node:", headline)
	for _, f := range faults {
		for _, line := range f.Details {
			w.row("  "+f.ID+":", line)
		}
		w.row("", "Remedy: "+f.Remedy)
	}
}

func (r reconcilerStatus) text(now time.Time) string {
	switch {
	case r.Answers:
		return fmt.Sprintf("%s, pid %d, up %s", *r.Version, *r.PID, diagnose.Age(now.Sub(r.Started)))
	case r.Running:
		return "running, but does not answer: " + r.Error
	case r.LastSeen.IsZero():
		return "not running; no reconciler has run with this data dir"
	}
	at := r.LastSeen.UTC().Format("2006-01-02 15:04 MST")
	return fmt.Sprintf("not running; last seen %s ago (%s)", diagnose.Age(now.Sub(r.LastSeen)), at)
}

// writeTable writes rows below their label and the names of the columns. Without a row it writes the text for
// none.
func (s *nodeStatus) writeTable(w *screen, label, none string, rows [][]string) {
	switch {
	case len(rows) > 1:
		w.WriteString(label + "\n")
		columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		for _, cells := range rows {
			fmt.Fprintf(columns, "  %s\n", strings.Join(cells, "\t"))
		}
		_ = columns.Flush() // never fails
	case s.unread:
		w.row(label, "unknown, for the reason above")
	default:
		w.row(label, none)
	}
}

func (s *nodeStatus) writeChains(w *screen) {
	rows := [][]string{{"NAME", "FAMILY", "BACKEND", "RULES", "MASQ", "EXEMPT"}}
	for _, c := range s.Chains {
		row := []string{c.Chain, string(c.Family), s.backendText(c), fmt.Sprint(c.Rules), "-", "-"}
		if c.Connections != nil {
			row[4] = fmt.Sprint(c.Connections[string(policy.ActionMasquerade)])
			row[5] = fmt.Sprint(c.Connections[string(policy.ActionExempt)])
		}
		rows = append(rows, row)
	}
	s.writeTable(w, "Chains:", "none; no source asks for one", rows)
	for _, c := range s.Chains {
		var keys []string
		if c.Guard != "" && c.Guard != policy.GuardOff {
			keys = append(keys, fmt.Sprintf("guard %s: %d packets", c.Guard, c.GuardPackets[string(c.Guard)]))
		}
		if c.EnforceExempt {
			keys = append(keys, "enforceExempt")
		}
		if c.Resets > 0 {
			keys = append(keys, fmt.Sprintf("%d connections reset", c.Resets))
		}
		if len(keys) > 0 {
			w.row("", c.Chain+", "+string(c.Family)+": "+strings.Join(keys, ", "))
		}
	}
}

// backendText returns the backend of a chain with the version of its program, if that can be run.
func (s *nodeStatus) backendText(c chainStatus) string {
	for _, p := range s.Programs {
		if p.Backend == c.Backend && p.Family == c.Family && p.Version != "" {
			return c.Backend + " " + p.Version
		}
	}
	return c.Backend
}

func (s *nodeStatus) writeSources(w *screen, now time.Time) {
	rows := [][]string{{"NAME", "STATE", "AGE", "FILES"}}
	for _, x := range s.Sources {
		name := "agent files"
		if x.Source.Kind == policy.Network {
			name = policy.Printable(x.Source.Name)
		}
		since := "-"
		if !x.Written.IsZero() {
			since = diagnose.Age(now.Sub(x.Written))
		}
		files := strings.Join(mapped(policy.First(4, x.Files), policy.Printable), ", ")
		rows = append(rows, []string{name, x.State, since, cmp.Or(files, "-")})
	}
	s.writeTable(w, "Sources:", "none", rows)
}

func (c conflistStatus) text() string {
	if c.File == "" || c.Error != "" {
		return cmp.Or(c.Error, "not used")
	}
	entry, managed := "no plugin entry", ""
	if c.Entry {
		entry = "plugin entry"
	}
	if c.Managed {
		managed = "; conflist.manage is on"
	}
	return policy.Printable(c.Network) + ": " + entry + " in " + policy.Printable(c.File) + managed
}

func (s *nodeStatus) repairsText(now time.Time) string {
	switch {
	case !s.Reconciler.Answers:
		return "unknown while no reconciler answers"
	case s.RepairsTotal == 0 || len(s.Repairs) == 0:
		return "none since the reconciler started"
	}
	last := s.Repairs[0]
	age, chains := diagnose.Age(now.Sub(last.At)), cmp.Or(strings.Join(last.Chains, ", "), "the guard tables")
	return fmt.Sprintf("%d since the reconciler started; the last %s ago in %s: "+
		"%d missing, %d unexpected; changed by %s",
		s.RepairsTotal, age, chains, last.Missing, last.Unexpected, last.By)
}

func (s *nodeStatus) found(severity diagnose.Severity) (found []diagnose.Finding) {
	for _, f := range s.Findings {
		if f.Severity == severity {
			found = append(found, f)
		}
	}
	return found
}

func idsOf(found []diagnose.Finding) string {
	return strings.Join(mapped(found, func(f diagnose.Finding) string { return f.ID }), ", ")
}

func (s *nodeStatus) doctorText() string {
	text := "no problems"
	if problems := s.found(diagnose.SeverityProblem); len(problems) > 0 {
		text = idsOf(problems) + ", see above"
	} else if len(s.found(diagnose.SeverityFault)) > 0 {
		text = "no other problems"
	}
	if notices := s.found(diagnose.SeverityNotice); len(notices) > 0 {
		text += `; notices, which "doctor" explains: ` + idsOf(notices)
	}
	return text
}

func (s *nodeStatus) writeProblems(w *screen) {
	for _, f := range s.found(diagnose.SeverityProblem) {
		w.row("  problem:", f.ID+": "+f.Cause)
		for _, line := range policy.First(4, f.Details) {
			w.row("", "- "+line)
		}
		w.row("", "Remedy: "+f.Remedy)
	}
}

// terminalWidth returns the number of columns of the terminal that a file is, or 0 if it is none.
func terminalWidth(f *os.File) int {
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return int(size.Col)
}

// wrapped breaks the lines of a text at spaces, so that they fit into the width. Longer words stay whole.
// Continuation lines are indented as the text of the line behind its dash, at least by hanging.
func wrapped(text string, width, hanging int) string {
	const least = 40 // a narrower terminal breaks the lines itself, and 0 is no terminal
	if width < least {
		return text
	}
	var b strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		indent := max(len(line)-len(strings.TrimLeft(line, " -")), hanging)
		row := ""
		for i, word := range strings.Split(line, " ") {
			longer := row + " " + word
			switch {
			case i == 0:
				row = word
			case word != "" && utf8.RuneCountInString(row) > indent && utf8.RuneCountInString(longer) > width:
				b.WriteString(strings.TrimRight(row, " ") + "\n")
				row = strings.Repeat(" ", indent) + word
			default:
				row = longer
			}
		}
		b.WriteString(row + "\n")
	}
	return b.String()
}
