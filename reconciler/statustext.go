// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

const (
	screenWidth = 80 // columns
	labelWidth  = 13

	unknown = "unknown, for the reason above"
	notUsed = "not used"
)

// screen is text of at most screenWidth columns.
type screen struct{ strings.Builder }

// row writes a label and its text, which wraps beside it.
func (s *screen) row(label, text string) {
	lines := wrap(text, screenWidth-labelWidth)
	if len(label) >= labelWidth { // it has a line of its own
		lines = append([]string{""}, lines...)
	}
	for _, line := range lines {
		s.WriteString(strings.TrimRight(fmt.Sprintf("%-*s%s", labelWidth, label, line), " ") + "\n")
		label = ""
	}
}

// table writes rows in columns. A last cell that does not fit gets lines of its own.
func (s *screen) table(rows [][]string) {
	var text strings.Builder
	columns := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	for _, cells := range rows {
		fmt.Fprintln(columns, "  "+escape(strings.Join(cells, "\t")))
	}
	_ = columns.Flush() // never fails
	for line := range strings.Lines(text.String()) {
		line = strings.TrimRight(line, " \n")
		last := ""
		if utf8.RuneCountInString(line) > screenWidth {
			i := strings.LastIndex(line, "  ")
			line, last = strings.TrimRight(line[:i], " "), line[i:]
		}
		s.WriteString(line + "\n")
		for _, part := range wrap(last, screenWidth-4) {
			s.WriteString("    " + part + "\n")
		}
	}
}

// wrap breaks text into lines of at most width columns: at its line ends, between words, and in words
// that are longer than a line. The lines of an item of a list ("- ") are indented.
func wrap(text string, width int) []string {
	var lines []string
	for paragraph := range strings.Lines(text) {
		line, indent := "", ""
		if strings.HasPrefix(paragraph, "- ") {
			indent = "  "
		}
		for word := range strings.FieldsSeq(paragraph) {
			switch {
			case line == "":
				line = word
			case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) <= width:
				line += " " + word
			default:
				lines, line = append(lines, line), indent+word
			}
			r := []rune(line)
			for ; len(r) > width; r = r[width:] {
				lines = append(lines, string(r[:width]))
			}
			line = string(r)
		}
		lines = append(lines, line)
	}
	return lines
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
	const most = 4
	items := mapped(s.Warnings, func(text string) string { return "- " + text })
	w.row("Warnings:", strings.Join(policy.First(most, items), "\n"))
	return w.String()
}

func (s podsStatus) text() string {
	text := fmt.Sprint(s.Recorded)
	if s.Exempt > 0 {
		text += fmt.Sprintf(", of which %d exempt by namespace", s.Exempt)
	}
	if s.WithoutRecord > 0 {
		text += fmt.Sprintf("; %s without a record", number(s.WithoutRecord, "attachment"))
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
	found := len(s.found(diagnose.SeverityProblem))
	rules := "the rules are right"
	if len(s.Chains) == 0 {
		rules = "nothing is managed"
	}
	headline := "not ready: " + number(len(s.Problems), "reason")
	switch {
	case len(s.Problems) > 0 && !s.Reconciler.Running:
		headline = "not ready: no reconciler runs, and " + number(len(s.Problems), "reason")
	case len(s.Problems) > 0:
	case !s.Reconciler.Running:
		headline = "not ready: no reconciler runs; " + rules
	case !s.Reconciler.Answers:
		headline = "not ready: the reconciler does not answer; " + rules
	case found > 0:
		headline = "ready, but doctor finds " + number(found, "problem")
	default:
		headline = "ready"
	}
	w.row("Node:", headline)
	for _, p := range s.Problems {
		w.row("  "+string(p.Reason)+":", p.Err.Error())
	}
}

func (s *nodeStatus) writeReconciler(w *screen, now time.Time) {
	r := s.Reconciler
	var text string
	switch {
	case r.Answers:
		text = fmt.Sprintf("%s, pid %d, up %s", *r.Version, *r.PID, diagnose.Age(now.Sub(r.Started)))
	case r.Running:
		text = "runs, and does not answer: " + r.Error
	case r.LastSeen.IsZero():
		text = "none runs, and none has run with this data dir"
	default:
		text = fmt.Sprintf("none runs; one was last seen %s ago (%s)", diagnose.Age(now.Sub(r.LastSeen)), r.LastSeen.UTC().Format("2006-01-02 15:04 MST"))
	}
	w.row("Reconciler:", text)
	if r.Answers {
		text = "none yet"
		if !r.LastSync.IsZero() {
			next := now.Add(time.Duration(r.IntervalSeconds * float64(time.Second)))
			text = fmt.Sprintf("%s ago, %s; at least one every %s", diagnose.Age(now.Sub(r.LastSync)), resultText(r.LastResult), diagnose.Age(next.Sub(now)))
		}
		w.row("Last sync:", text)
	}
}

// resultText says what a sync did: "unchanged" alone seems to deny a repair or a new policy a moment before.
func resultText(result string) string {
	if result == string(reconcile.Unchanged) {
		return "nothing to repair"
	}
	return result
}

// settingsText names the origin of the settings, and those that are stated.
func (s *nodeStatus) settingsText() string {
	var stated []string
	for _, x := range s.Settings {
		if x.Origin != config.DefaultOrigin {
			const most = 40
			stated = append(stated, x.Key+"="+policy.Printable(shorten(x.Value, most)))
		}
	}
	text, _, _ := strings.Cut(s.SettingsFrom, " (pid") // which another row has
	if len(stated) > 0 {
		text += ": " + strings.Join(stated, ", ")
	}
	if !s.Reconciler.Answers {
		text += "; the reconciler's flags are unknown"
	}
	return text
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
	const most, mostName = 8, 24
	rows := [][]string{{"NAME", "STATE", "AGE", "FILE"}}
	for _, x := range s.Sources[:min(most, len(s.Sources))] {
		name := "agent files"
		if x.Source.Kind == policy.Network {
			name = shorten(policy.Printable(x.Source.Name), mostName)
		}
		since := "-"
		if !x.Written.IsZero() {
			since = diagnose.Age(now.Sub(x.Written))
		}
		rows = append(rows, []string{name, string(x.State), since, policy.Printable(x.File)})
	}
	w.table(rows)
	if more := len(s.Sources) - most; more > 0 {
		w.row("", fmt.Sprintf("and %d more", more))
	}
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
	if c.Inserted > 0 {
		text += fmt.Sprintf(", and the reconciler inserted it %s", number(c.Inserted, "time"))
	}
	return text
}

func (s *nodeStatus) repairsText(now time.Time) string {
	switch {
	case !s.Reconciler.Answers:
		return "unknown without the reconciler"
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

// doctorText counts the problems, and names the notices.
func (s *nodeStatus) doctorText() string {
	text := "no problems"
	if len(s.Problems) > 0 {
		text = "no other problems"
	}
	if n := len(s.found(diagnose.SeverityProblem)); n > 0 {
		text = number(n, "problem") + ", above"
	}
	if notices := s.found(diagnose.SeverityNotice); len(notices) > 0 {
		ids := mapped(notices, func(f diagnose.Finding) string { return f.ID })
		text += `; notices, which "doctor" explains: ` + strings.Join(ids, ", ")
	}
	return text
}

// writeProblems writes the problems that doctor finds with their remedies.
func (s *nodeStatus) writeProblems(w *screen) {
	const most = 4
	for _, f := range s.found(diagnose.SeverityProblem) {
		w.row("  problem:", f.ID+": "+f.Summary)
		for _, line := range policy.First(most, f.Detail) {
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

// shorten cuts a text after most characters.
func shorten(text string, most int) string {
	if r := []rune(text); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	return text
}
