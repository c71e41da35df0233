// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	unknown = "unknown, for the reason above"
	notUsed = "not used"

	labelWidth = 13 // of the column of labels
)

// screen is the text of the status.
type screen struct{ strings.Builder }

// row writes a label and its text.
func (s *screen) row(label, text string) {
	text = strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n"+strings.Repeat(" ", labelWidth))
	fmt.Fprintf(s, "%-12s %s\n", label, text)
}

// table writes rows in columns.
func (s *screen) table(rows [][]string) {
	columns := tabwriter.NewWriter(s, 0, 0, 2, ' ', 0)
	for _, cells := range rows {
		fmt.Fprintln(columns, "  "+strings.Join(cells, "\t"))
	}
	_ = columns.Flush() // never fails
}

// text writes the status for people.
func (s *nodeStatus) text(now time.Time) string {
	w := &screen{}
	s.writeNode(w)
	s.writeProblems(w)
	s.writeReconciler(w, now)
	plugin := cmp.Or(s.Plugin.Error, notUsed)
	if s.Plugin.Version != "" {
		plugin = s.Plugin.Version + ", " + policy.Printable(s.Plugin.Path)
	}
	w.row("Plugin:", plugin)
	w.row("Settings:", s.settingsText())
	w.row("Data dir:", s.dataDirText())
	s.writeChains(w)
	s.writeSources(w, now)
	if s.Pods != (podsStatus{}) {
		w.row("Pods:", s.Pods.text())
	}
	w.row("Conflist:", s.Conflist.text())
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
		text += fmt.Sprintf("; %s without a record", number(s.WithoutRecord, "attachment"))
	}
	return text
}

// settingsText is where the settings come from, and those that are not the defaults.
func (s *nodeStatus) settingsText() string {
	defaults := config.DefaultSettings().List()
	text := s.SettingsFrom
	for _, x := range s.Settings {
		isDefault := x.Origin == config.DefaultOrigin ||
			slices.ContainsFunc(defaults, func(d config.Setting) bool { return d.Key == x.Key && d.Value == x.Value })
		if !isDefault && x.Key != "data_dir" { // which has a row of its own
			text += fmt.Sprintf("\n%s = %s (%s)", x.Key, policy.Printable(cmp.Or(x.Value, "none")), policy.Printable(x.Origin))
		}
	}
	return text
}

// dataDirText is the dataDir, and what states it.
func (s *nodeStatus) dataDirText() string {
	text := policy.Printable(s.DataDir)
	if i := slices.IndexFunc(s.Settings, func(x config.Setting) bool { return x.Key == "data_dir" }); i >= 0 {
		text += " (" + policy.Printable(s.Settings[i].Origin) + ")"
	}
	return text
}

// writeNode writes whether the node is ready, and the reasons.
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

func (s *nodeStatus) writeReconciler(w *screen, now time.Time) {
	r := s.Reconciler
	var text string
	switch {
	case r.Answers:
		text = fmt.Sprintf("%s, pid %d, up %s", *r.Version, *r.PID, diagnose.Age(now.Sub(r.Started)))
	case r.Running:
		text = "running, but does not answer: " + r.Error
	case r.LastSeen.IsZero():
		text = "not running; no reconciler has run with this data dir"
	default:
		text = fmt.Sprintf("not running; last seen %s ago (%s)", diagnose.Age(now.Sub(r.LastSeen)), r.LastSeen.UTC().Format("2006-01-02 15:04 MST"))
	}
	w.row("Reconciler:", text)
}

func (s *nodeStatus) writeChains(w *screen) {
	switch {
	case len(s.Chains) == 0 && s.unread:
		w.row("Chains:", unknown)
		return
	case len(s.Chains) == 0:
		w.row("Chains:", "none; no source asks for one")
		return
	}
	w.WriteString("Chains:\n")
	rows := [][]string{{"NAME", "FAMILY", "BACKEND", "RULES", "MASQ", "EXEMPT"}}
	for _, c := range s.Chains {
		row := []string{c.Chain, string(c.Family), c.Backend, fmt.Sprint(c.Rules), "-", "-"}
		if c.Connections != nil {
			row[4], row[5] = fmt.Sprint(c.Connections[string(policy.ActionMasquerade)]), fmt.Sprint(c.Connections[string(policy.ActionExempt)])
		}
		rows = append(rows, row)
	}
	w.table(rows)
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

func (s *nodeStatus) writeSources(w *screen, now time.Time) {
	if len(s.Sources) == 0 {
		text := "none"
		if s.unread {
			text = unknown
		}
		w.row("Sources:", text)
		return
	}
	w.WriteString("Sources:\n")
	const mostFiles = 4
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
		files := strings.Join(mapped(policy.First(mostFiles, x.Files), policy.Printable), ", ")
		rows = append(rows, []string{name, string(x.State), since, cmp.Or(files, "-")})
	}
	w.table(rows)
}

func (c conflistStatus) text() string {
	if c.File == "" || c.Error != "" {
		return cmp.Or(c.Error, notUsed)
	}
	text := policy.Printable(c.Network) + ": plugin entry in "
	if !c.Entry {
		text = policy.Printable(c.Network) + ": no plugin entry in "
	}
	text += policy.Printable(c.File)
	if c.Managed {
		text += "; conflist.manage is on"
	}
	return text
}

func (s *nodeStatus) repairsText(now time.Time) string {
	switch {
	case !s.Reconciler.Answers:
		return "unknown while no reconciler answers"
	case s.RepairsTotal == 0 || len(s.Repairs) == 0:
		return "none since the reconciler started"
	}
	last := s.Repairs[0]
	return fmt.Sprintf("%d since the reconciler started; the last %s ago in %s: %d missing, %d unexpected; changed by %s",
		s.RepairsTotal, diagnose.Age(now.Sub(last.At)), cmp.Or(strings.Join(last.Chains, ", "), "the guard tables"), last.Missing, last.Unexpected, last.By)
}

// found returns the findings of a severity.
func (s *nodeStatus) found(severity diagnose.Severity) []diagnose.Finding {
	return slices.DeleteFunc(slices.Clone(s.Findings), func(f diagnose.Finding) bool { return f.Severity != severity })
}

// idsOf lists the IDs of findings.
func idsOf(found []diagnose.Finding) string {
	return strings.Join(mapped(found, func(f diagnose.Finding) string { return f.ID }), ", ")
}

// doctorText names the problems and the notices.
func (s *nodeStatus) doctorText() string {
	text := "no problems"
	if len(s.found(diagnose.SeverityFault)) > 0 {
		text = "no other problems"
	}
	if problems := s.found(diagnose.SeverityProblem); len(problems) > 0 {
		text = idsOf(problems) + ", see above"
	}
	if notices := s.found(diagnose.SeverityNotice); len(notices) > 0 {
		text += `; notices, which "doctor" explains: ` + idsOf(notices)
	}
	return text
}

// writeProblems writes the problems that doctor finds with their remedies.
func (s *nodeStatus) writeProblems(w *screen) {
	const most = 4
	for _, f := range s.found(diagnose.SeverityProblem) {
		w.row("  problem:", f.ID+": "+f.Cause)
		for _, line := range policy.First(most, f.Details) {
			w.row("", "- "+line)
		}
		w.row("", "Remedy: "+f.Remedy)
	}
}

// number writes 1 reason, 2 reasons.
func number(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}
