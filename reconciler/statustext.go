// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

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
	w.row("Data dir:", s.dataDirText())
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

// dataDirText returns the dataDir and where it is stated.
func (s *nodeStatus) dataDirText() string {
	text := policy.Printable(s.DataDir)
	for _, x := range s.Settings {
		if x.Key == dataDirKey {
			return text + " (" + policy.Printable(x.Origin) + ")"
		}
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
		if isDefault || x.Key == dataDirKey { // which has a row of its own
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
	var ids []string
	for _, f := range found {
		ids = append(ids, f.ID)
	}
	return strings.Join(ids, ", ")
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
