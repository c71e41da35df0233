// SPDX-License-Identifier: Apache-2.0

// Package docs_test compares the documents with the files, headings, commands, flags,
// findings, alerts and tests that they name.
package docs_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

const root = ".."

// documents returns the texts of all documents of the project, by path.
func documents(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && (name == "bin" || name == "testdata" || name != root && strings.HasPrefix(name, ".")):
			return filepath.SkipDir
		case filepath.Ext(name) == ".md":
			text, err := os.ReadFile(path)
			all[path] = string(text)
			return err
		}
		return nil
	})
	if err != nil || len(all) < 10 {
		t.Fatalf("found %d documents: %v", len(all), err)
	}
	form := filepath.Join(root, ".github", "ISSUE_TEMPLATE", "bug.yml")
	text := assert.Must(os.ReadFile(form))(t)
	all[form] = string(text)
	return all
}

var (
	fenced  = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	heading = regexp.MustCompile(`(?m)^#+ +(.+)$`)
	link    = regexp.MustCompile(`\]\(([^()\s]+)\)`)
)

// anchors returns the fragments by which the headings of a document are reached.
func anchors(text string) []string {
	var all []string
	for _, m := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		name := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
		all = append(all, strings.ReplaceAll(name, " ", "-"))
	}
	return all
}

// TestLinks: each link within the project leads to a file, and to a heading in it.
func TestLinks(t *testing.T) {
	all := documents(t)
	for path, text := range all {
		for _, m := range link.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			file, anchor, hasAnchor := strings.Cut(m[1], "#")
			if strings.Contains(m[1], "://") {
				continue
			}
			target := path
			if file != "" {
				target = filepath.Join(filepath.Dir(path), file)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s: %v", path, m[1], err)
			} else if hasAnchor && !slices.Contains(anchors(all[target]), anchor) {
				t.Errorf("%s links to %s, and %s has no such heading", path, m[1], target)
			}
		}
	}
}

// TestIndex: docs/README.md links to each document of its directory.
func TestIndex(t *testing.T) {
	files, _ := filepath.Glob("*.md")
	for _, file := range files {
		if file != "README.md" && !strings.Contains(read(t, "docs", "README.md"), "("+file) {
			t.Errorf("docs/README.md does not link to %s", file)
		}
	}
}

// help returns the output of a command's --help.
func help(t *testing.T, command ...string) string {
	t.Helper()
	path := filepath.Join(os.Getenv("IPMASQ_BIN_DIR"), "ip-masq-reconciler")
	out, err := exec.Command(path, append(command, "--help")...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q --help: %v\n%s\nrun make build, and set IPMASQ_BIN_DIR", path, command, err, out)
	}
	return string(out)
}

// TestCommands: the reconciler has each command and flag that documents and the issue form name.
func TestCommands(t *testing.T) {
	// A call begins a line or a code span; messages have a colon after the name.
	call := regexp.MustCompile("(?m)(?:^ *|^ *\\$ |`)ip-masq-reconciler( [a-z]+)?((?: +(?:[^\\s`|;#&]|\\\\\n)+)*)")
	flags := regexp.MustCompile(`(?:^|\s)--([a-z][a-z0-9-]*)`)
	alone := regexp.MustCompile("`--([a-z][a-z0-9-]*)")
	listed := regexp.MustCompile(`(?m)^  ([a-z]+) `)
	foreign := []string{ // of other programs, and klog's, which --help does not list
		"non-masquerade-cidr", "masquerade-all", "ip-masq", "noflush", "v", "logs", "reset-then-reuse-values", "set-json",
		"masquerading", "cleanup-config-on-exit", "skip-config-watch", "multus-master-cni-file-name",
	}
	general := help(t)
	helps, all := map[string]string{"": general}, general
	for _, m := range listed.FindAllStringSubmatch(general, -1) {
		helps[m[1]] = general + help(t, m[1])
		all += helps[m[1]]
	}
	calls := 0
	for path, text := range documents(t) {
		for _, m := range call.FindAllStringSubmatch(text, -1) {
			calls++
			known, is := helps[strings.TrimSpace(m[1])]
			if !is {
				t.Errorf("%s: %q: there is no such command", path, m[0])
			}
			for _, f := range flags.FindAllStringSubmatch(m[2], -1) {
				if is && !strings.Contains(known, "--"+f[1]+" ") {
					t.Errorf("%s: %q: there is no flag --%s", path, m[0], f[1])
				}
			}
		}
		for _, f := range alone.FindAllStringSubmatch(text, -1) {
			if !strings.Contains(all, "--"+f[1]+" ") && !slices.Contains(foreign, f[1]) {
				t.Errorf("%s: there is no flag --%s", path, f[1])
			}
		}
	}
	if calls < 30 {
		t.Errorf("found %d calls: the pattern is wrong", calls)
	}
}

// read returns the text of a file of the project.
func read(t *testing.T, path ...string) string {
	t.Helper()
	text := assert.Must(os.ReadFile(filepath.Join(append([]string{root}, path...)...)))(t)
	return string(text)
}

// names returns the group of each match, sorted.
func names(pattern, text string) []string {
	var all []string
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		all = append(all, m[1])
	}
	slices.Sort(all)
	return all
}

// TestAlerts: operate.md has a row for each alert, and for no other.
func TestAlerts(t *testing.T) {
	has := names("(?m)^\\| `(IPMasq\\w+)`", read(t, "docs", "operate.md"))
	want := names(`- alert: (\w+)`, read(t, "deploy", "kustomize", "components", "monitoring", "rules.yaml"))
	if len(want) == 0 || !slices.Equal(want, has) {
		t.Errorf("alerts:\n%q\noperate.md has:\n%q", want, has)
	}
}

// TestRunbooks: each alert's runbook_url leads to a heading of a document.
func TestRunbooks(t *testing.T) {
	const base = "https://github.com/ip-masq/ip-masq-cni/blob/main/docs/"
	rules := strings.Split(read(t, "deploy", "kustomize", "components", "monitoring", "rules.yaml"), "- alert: ")[1:]
	for _, rule := range rules {
		name, _, _ := strings.Cut(rule, "\n")
		urls := names(`runbook_url: (\S+)`, rule)
		if len(urls) != 1 || !strings.HasPrefix(urls[0], base) {
			t.Errorf("%s has runbook_url %q", name, urls)
			continue
		}
		file, anchor, _ := strings.Cut(strings.TrimPrefix(urls[0], base), "#")
		if !slices.Contains(anchors(read(t, "docs", file)), anchor) {
			t.Errorf("%s: runbook_url leads to %s, which has no heading %q", name, file, anchor)
		}
	}
	if len(rules) == 0 {
		t.Error("found no alert")
	}
}

// TestReasons: each reason why a node is not ready has a section of troubleshooting.md, a row that leads to it and
// says what it means, and an alert that leads there.
func TestReasons(t *testing.T) {
	text, alerts := read(t, "docs", "troubleshooting.md"), read(t, "deploy", "kustomize", "components", "monitoring", "rules.yaml")
	for _, f := range reconcile.Faults() {
		if strings.Count(text, "\n### "+string(f.Reason)+"\n") != 1 {
			t.Errorf("troubleshooting.md has no section %s, or several", f.Reason)
		}
		meaning := strings.ToLower(f.Cause[:1]) + strings.TrimSuffix(f.Cause[1:], ".")
		rows := names(`(?m)^\| \[`+string(f.Reason)+`\]\(#`+string(f.Reason)+`\) \| (.*) \|$`, strings.ReplaceAll(text, "`", ""))
		if !slices.Equal(rows, []string{meaning}) {
			t.Errorf("troubleshooting.md says that %s means %q, want %q", f.Reason, rows, meaning)
		}
		if !slices.ContainsFunc(strings.Split(alerts, "- alert: "), func(alert string) bool {
			return strings.Contains(alert, `ip_masq_not_ready{reason="`+string(f.Reason)+`"}`) && strings.Contains(alert, "docs/troubleshooting.md#"+string(f.Reason)+"\n")
		}) {
			t.Errorf("no alert for %s leads to its section", f.Reason)
		}
	}
}

// TestExitCodes: reconciler.md has the exit codes that the help of each command has.
func TestExitCodes(t *testing.T) {
	_, section, _ := strings.Cut(read(t, "docs", "reconciler.md"), "\n| command | 0 | 1 | 3 |\n")
	section, _, _ = strings.Cut(section, "\n\n")
	documented := 0
	for row := range strings.Lines(section) {
		cells := strings.Split(row, "|")
		for _, command := range names("`([a-z]+)`", cells[1]) {
			documented++
			want := []string{"2"} // of every command
			for i, code := range []string{"0", "1", "3"} {
				if strings.TrimSpace(cells[2+i]) != "" {
					want = append(want, code)
				}
			}
			slices.Sort(want)
			_, codes, _ := strings.Cut(help(t, command), "\nExit codes:")
			codes, _, _ = strings.Cut(codes, "\n\n")
			if has := names(`(?:^|;)\s(\d) `, codes); !slices.Equal(has, want) {
				t.Errorf("%s --help has the exit codes %q, reconciler.md has %q", command, has, want)
			}
		}
	}
	commands := names(`(?m)^  ([a-z]+) `, help(t))
	if commands = slices.DeleteFunc(commands, func(c string) bool { return c == "completion" }); documented != len(commands) { // cobra's own
		t.Errorf("reconciler.md has the exit codes of %d commands, --help lists %q", documented, commands)
	}
}

// TestStatus: each output in troubleshooting.md is one of status.
func TestStatus(t *testing.T) {
	files, _ := filepath.Glob(filepath.Join(root, "reconciler", "testdata", "status", "*.txt"))
	outputs := regexp.MustCompile("(?s)```text\n(.*?)```").FindAllStringSubmatch(read(t, "docs", "troubleshooting.md"), -1)
	if len(outputs) < 2 {
		t.Errorf("found %d outputs", len(outputs))
	}
	for _, m := range outputs {
		if !slices.ContainsFunc(files, func(file string) bool { return strings.Contains(read(t, strings.TrimPrefix(file, root)), m[1]) }) {
			t.Errorf("troubleshooting.md has an output that status does not print:\n%s", m[1])
		}
	}
}

// TestStatusPicture: the picture of status has the lines of the golden file, after the command.
func TestStatusPicture(t *testing.T) {
	var has []string
	for _, line := range names(`(?m)<text [^>]*>(.*)</text>$`, read(t, "docs", "img", "status.svg")) {
		has = append(has, regexp.MustCompile(`<[^>]*>`).ReplaceAllString(line, ""))
	}
	want := strings.Split("$ ip-masq-reconciler status\n"+strings.TrimSuffix(read(t, "reconciler", "testdata", "status", "healthy.txt"), "\n"), "\n")
	slices.Sort(has)
	slices.Sort(want)
	if !slices.Equal(has, want) {
		t.Errorf("img/status.svg has the lines\n%q\nstatus prints\n%q", has, want)
	}
}

// TestStatusFields: reconciler.md has each field of the JSON of status.
func TestStatusFields(t *testing.T) {
	_, section, _ := strings.Cut(read(t, "docs", "reconciler.md"), "### status as JSON\n")
	section, _, _ = strings.Cut(section, "\n### ")
	fields := append(names(`json:"(\w+)`, read(t, "reconciler", "status.go")), names(`json:"(\w+)`, read(t, "reconciler", "inspect.go"))...)
	for _, field := range fields {
		if !strings.Contains(section, "`"+field+"`") {
			t.Errorf("reconciler.md lacks the field %s", field)
		}
	}
	if len(fields) < 30 {
		t.Errorf("found the fields %q", fields)
	}
}

// TestFindings: troubleshooting.md has a row for each finding of doctor that is no fault, with its cause, by ID.
// -update writes them. Each ID has one remedy, which does not refer to other texts.
func TestFindings(t *testing.T) {
	var rows string
	ids := map[string]bool{}
	remedied := func(id, remedy string) {
		if ids[id] || !strings.HasSuffix(remedy, ".") || regexp.MustCompile(`(?i)\b(message|line)s? (says?|asks?)`).MatchString(remedy) {
			t.Errorf("%s: is there twice, or its remedy does not say what to do: %s", id, remedy)
		}
		ids[id] = true
	}
	for _, f := range reconcile.Faults() {
		remedied(string(f.Reason), f.Remedy)
	}
	findings := diagnose.Findings()
	slices.SortFunc(findings, func(f, g diagnose.Finding) int { return strings.Compare(f.ID, g.ID) })
	for _, f := range findings {
		remedied(f.ID, f.Remedy)
		rows += "| `" + f.ID + "` | " + regexp.MustCompile(`\b[a-z]+[A-Z]\w*\b`).ReplaceAllString(strings.TrimSuffix(f.Cause, "."), "`$0`") + " |\n"
	}
	text := read(t, "docs", "troubleshooting.md")
	before, rest, found := strings.Cut(text, "\n| finding | cause |\n|---|---|\n")
	_, after, ends := strings.Cut(rest, "\n\n")
	if !found || !ends {
		t.Fatal("troubleshooting.md has no table of findings")
	}
	golden.Check(t, filepath.Join(root, "docs", "troubleshooting.md"), before+"\n| finding | cause |\n|---|---|\n"+rows+"\n"+after)
}

// TestTests: each test that a document names exists, in the directory that it names before a colon. Each bound of
// security.md and each row of compatibility.md has one.
func TestTests(t *testing.T) {
	tests := map[string]string{} // by directory; "" has all
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			text := read(t, strings.TrimPrefix(path, root))
			tests[strings.TrimPrefix(filepath.Dir(path), root+"/")] += text
			tests[""] += text
		}
		return err
	})
	assert.NoError(t, err)
	named := 0
	for path, text := range documents(t) {
		for _, m := range regexp.MustCompile("(?:`([a-z0-9/]+): )?\\b(Test[A-Z][A-Za-z0-9]*)").FindAllStringSubmatch(text, -1) {
			named++
			want := "\nfunc " + m[2] // -run accepts the beginning of a name
			if m[1] != "" {
				want += "("
			}
			if !strings.Contains(tests[m[1]], want) {
				t.Errorf("%s: there is no %s %s", path, m[1], m[2])
			}
		}
	}
	if named < 60 {
		t.Errorf("found %d names of tests: the pattern is wrong", named)
	}
	_, bounds, _ := strings.Cut(read(t, "docs", "security.md"), "## What an author")
	compatible, _, _ := strings.Cut(read(t, "docs", "compatibility.md"), "## Imitations")
	row := regexp.MustCompile(`(?m)^\| .*\|$`)
	for _, row := range append(row.FindAllString(bounds, -1), row.FindAllString(compatible, -1)...) {
		if !regexp.MustCompile(": Test|`make |\\| (?:test|command|the same) \\|$").MatchString(row) {
			t.Errorf("no test shows %s", row)
		}
	}
}

// TestImitations: each imitation names the source and commit that the table of docs/compatibility.md has for it.
func TestImitations(t *testing.T) {
	rows := regexp.MustCompile("(?m)^\\| [^|]+ \\| `(\\S+@[0-9a-f]{12})[0-9a-f]{28}(:\\S+)` \\| `(\\S+)` \\|$").FindAllStringSubmatch(read(t, "docs", "compatibility.md"), -1)
	for _, row := range rows {
		if source := row[1] + row[2]; !strings.Contains(read(t, row[3]), source) {
			t.Errorf("%s does not name %s", row[3], source)
		}
	}
	if len(rows) < 11 {
		t.Errorf("the table has %d sources", len(rows))
	}
}
