// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"cmp"
	"errors"
	"fmt"
	"io"
)

// Severity tells how bad a finding is.
type Severity string

// The severities.
const (
	SeverityProblem Severity = "problem" // defeats the policy, or will break
	SeverityNotice  Severity = "notice"  // will surprise
)

// rank orders severities, the worst first.
func (s Severity) rank() int {
	if s == SeverityProblem {
		return 0
	}
	return 1
}

// Finding is something that was found on the node.
type Finding struct {
	ID       string   `json:"id"` // stable, in kebab-case
	Severity Severity `json:"severity"`
	Summary  string   `json:"summary"` // one sentence
	Detail   []string `json:"detail"`  // where it was found, a line each
	Remedy   string   `json:"remedy"`  // what to do about it
}

// compare orders findings by severity, then by ID.
func (f Finding) compare(g Finding) int {
	return cmp.Or(f.Severity.rank()-g.Severity.rank(), cmp.Compare(f.ID, g.ID))
}

// mostDetail is how many details of one finding are written for people.
const mostDetail = 12

// WriteText writes the findings for people: severity and ID, then the summary,
// the details and the remedy.
func WriteFindings(w io.Writer, findings []Finding) error {
	if len(findings) == 0 {
		_, err := fmt.Fprintln(w, "Nothing found that defeats the policy or will surprise.")
		return err
	}
	for i, f := range findings {
		gap := "\n"
		if i == 0 {
			gap = ""
		}
		_, err := fmt.Fprintf(w, "%s%s: %s\n  %s\n", gap, f.Severity, f.ID, f.Summary)
		for _, line := range f.Detail[:min(len(f.Detail), mostDetail)] {
			_, errLine := fmt.Fprintf(w, "    - %s\n", line)
			err = errors.Join(err, errLine)
		}
		if rest := len(f.Detail) - mostDetail; rest > 0 {
			_, errRest := fmt.Fprintf(w, "    - and %d more\n", rest)
			err = errors.Join(err, errRest)
		}
		_, errRemedy := fmt.Fprintf(w, "  Remedy: %s\n", f.Remedy)
		if err := errors.Join(err, errRemedy); err != nil {
			return err
		}
	}
	return nil
}
