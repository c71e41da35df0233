// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
)

// report is the content of docs/benchmarks/README.md.
type report struct {
	sections []*section
	budgets  []budget
	plots    map[string][]byte
	// scale are the measured lines of docs/scale.md.
	scale          strings.Builder
	took           time.Duration
	quick, partial bool
	busy           float64 // load average of the last minute before the run
	short          map[string]map[string]measure.Series
}

func newReport() *report {
	return &report{plots: map[string][]byte{}, short: map[string]map[string]measure.Series{}}
}

// budget is a row of the table of budgets.
type budget struct {
	work, promise, measured string
	verdict                 verdict
	// reason explains a missed budget.
	reason string
}

// verdict is the result of a budget. It is not certain if the figure's interval crosses the limit.
type verdict struct{ held, certain bool }

// atMost returns the verdict for an upper limit.
func atMost(e measure.Estimate, most float64) verdict {
	held := e.Median <= most
	return verdict{held, held == (e.High <= most) && held == (e.Low <= most)}
}

// plainly returns the verdict for a counted value.
func plainly(held bool) verdict { return verdict{held, true} }

func (v verdict) String() string {
	word := "held"
	if !v.held {
		word = "**missed**"
	}
	if !v.certain {
		word += ", uncertain"
	}
	return word
}

func (r *report) judge(b budget) { r.budgets = append(r.budgets, b) }

type section struct {
	title string
	text  strings.Builder
}

func (r *report) section(title string) *section {
	s := &section{title: title}
	r.sections = append(r.sections, s)
	return s
}

// say adds paragraphs and lists, wrapped.
func (s *section) say(format string, args ...any) {
	s.text.WriteString(wrap(fmt.Sprintf(format, args...)) + "\n\n")
}

// wrap breaks each line at 100 columns, but no code span.
func wrap(text string) string {
	const columns = 100
	var lines []string
	for paragraph := range strings.SplitSeq(text, "\n") {
		indent := ""
		if strings.HasPrefix(paragraph, "- ") {
			indent = "  "
		}
		line, span := "", ""
		for _, word := range strings.Fields(paragraph) {
			if word = span + word; strings.Count(word, "`")%2 != 0 {
				span = word + " "
				continue
			}
			span = ""
			switch {
			case line == "":
				line = word
			case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > columns:
				lines = append(lines, line)
				line = indent + word
			default:
				line += " " + word
			}
		}
		lines = append(lines, strings.TrimSuffix(line+" "+span, " ")) // span is of an odd backtick
	}
	return strings.Join(lines, "\n")
}

// table adds a table; the first row is its head.
func (s *section) table(rows [][]string) { s.text.WriteString(table(rows) + "\n") }

// folded adds a table that is collapsed under its title.
func (s *section) folded(title string, rows [][]string) {
	fmt.Fprintf(&s.text, "<details><summary>%s</summary>\n\n%s\n</details>\n\n", title, table(rows))
}

func table(rows [][]string) string {
	var b strings.Builder
	for i, row := range rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			b.WriteString("|---|" + strings.Repeat("---:|", len(row)-1) + "\n")
		}
	}
	return b.String()
}

// plot adds an image to the section.
func (r *report) plot(s *section, file, alt string, svg []byte, err error) error {
	if err != nil {
		return err
	}
	r.plots[file] = svg
	fmt.Fprintf(&s.text, "![%s](%s)\n\n", alt, file)
	return nil
}

// write writes the report and its plots into a directory, and the measured lines into
// docs/scale.md.
func (r *report) write(dir, scale string) error {
	text, err := r.text()
	if err != nil {
		return err
	}
	errs := []error{os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "README.md"), []byte(text), 0o644)}
	for file, svg := range r.plots {
		errs = append(errs, os.WriteFile(filepath.Join(dir, file), svg, 0o644))
	}
	if r.scale.Len() > 0 && !r.quick {
		errs = append(errs, r.writeScale(scale))
	}
	return errors.Join(errs...)
}

// writeScale replaces the text between the marks of a hand-written document.
func (r *report) writeScale(path string) error {
	const begin, end = "<!-- measured: make bench writes what follows -->\n", "<!-- end of what was measured -->\n"
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) && r.partial { // a run for development
		text, err = []byte(begin+end), nil
	}
	if err != nil {
		return fmt.Errorf("write measured figures: %w", err)
	}
	head, rest, found := strings.Cut(string(text), begin)
	_, tail, ends := strings.Cut(rest, end)
	if !found || !ends {
		return fmt.Errorf("write measured figures: %s lacks the marks %q and %q", path, begin, end)
	}
	return os.WriteFile(path, []byte(head+begin+"\n"+r.scale.String()+"\n"+end+tail), 0o644)
}

func (r *report) text() (string, error) {
	machine, err := describeMachine(r.busy)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("# Benchmarks\n\n" + wrap("This page has the cost of ip-masq for the start of a pod, a connection, a repair and a node, and compares it "+
		"with the alternatives. It is for operators who want to know these costs, and for developers. `make bench` "+
		"measures all figures and writes this page; do not edit it.\n\n"+
		"- **Rounds.** All contenders of a comparison run in turn, once per round, in network namespaces. Their order "+
		"is random and changes with each round.\n"+
		"- **Ratios.** A ratio compares two figures of one round. The page has the median of the ratios and, in "+
		"brackets, the 95 % confidence interval of the median. The interval is a bootstrap; with fewer than 6 rounds, "+
		"it is the minimum and the maximum.\n"+
		"- **Times.** A time is a median with its quartiles. Times depend on the machine and on its load. Only the "+
		"verdicts on repairs, the guard and resets depend on times, because their budgets are times.") + "\n\n")
	if r.quick {
		b.WriteString("**This was a quick run: few rounds, without the largest sizes. Its verdicts are not reliable.**\n\n")
	}
	if r.partial {
		b.WriteString("**This was a partial run: the report omits sections.**\n\n")
	}
	if r.busy > float64(runtime.NumCPU())/2 {
		fmt.Fprintf(&b, "**The machine was busy before the run began (load %.1f). The times, and the verdicts that depend on\ntimes, are not reliable.**\n\n", r.busy)
	}
	fmt.Fprintf(&b, "%s\nThe run took %s.\n\n", machine, r.took.Round(time.Second))
	b.WriteString(r.summary())
	b.WriteString("## Budgets\n\n" + wrap("Each budget is an upper limit. A verdict is *uncertain* if the interval of the figure crosses the limit.") + "\n\n")
	rows := [][]string{{"operation", "budget", "measured", "verdict"}}
	var reasons []string
	for _, row := range r.budgets {
		if !row.verdict.held {
			reasons = append(reasons, wrap(fmt.Sprintf("- **%s**: %s", row.work, row.reason)))
		}
		rows = append(rows, []string{row.work, row.promise, row.measured, row.verdict.String()})
	}
	b.WriteString(table(rows) + "\n")
	if len(reasons) > 0 {
		b.WriteString("Reasons for missed budgets:\n\n" + strings.Join(reasons, "\n") + "\n\n")
	}
	for _, s := range r.sections {
		fmt.Fprintf(&b, "## %s\n\n%s", s.title, s.text.String())
	}
	return strings.TrimRight(b.String(), "\n") + "\n", nil
}
