// SPDX-License-Identifier: Apache-2.0

// Package docs_test holds the documents against what they speak of: files,
// headings, commands and flags, alerts.
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

// TestLinks: what a document links to within the project is there, headings too.
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

// TestIndex: the index leads to each document beside it.
func TestIndex(t *testing.T) {
	for path := range documents(t) {
		if name := filepath.Base(path); filepath.Dir(path) == filepath.Join(root, "docs") && name != "README.md" {
			if text := documents(t)[filepath.Join(root, "docs", "README.md")]; !strings.Contains(text, "("+name) {
				t.Errorf("docs/README.md does not link to %s", name)
			}
		}
	}
}

// help returns what --help of a command says.
func help(t *testing.T, command ...string) string {
	t.Helper()
	path := filepath.Join(os.Getenv("IPMASQ_BIN_DIR"), "ip-masq-reconciler")
	out, err := exec.Command(path, append(command, "--help")...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q --help: %v\n%s\nrun make build, and set IPMASQ_BIN_DIR", path, command, err, out)
	}
	return string(out)
}

// TestCommands: each command and flag of the reconciler that documents name is
// one that it has.
func TestCommands(t *testing.T) {
	// A call begins a line or a quotation; messages have a colon after the name.
	call := regexp.MustCompile("(?m)(?:^ *|^ *\\$ |`)ip-masq-reconciler( [a-z]+)?((?: +(?:[^\\s`|;#&]|\\\\\n)+)*)")
	flags := regexp.MustCompile(`(?:^|\s)--([a-z][a-z0-9-]*)`)
	alone := regexp.MustCompile("`--([a-z][a-z0-9-]*)")
	listed := regexp.MustCompile(`(?m)^  ([a-z]+) `)
	others := []string{ // of other programs, and klog's, which --help does not list
		"non-masquerade-cidr", "masquerade-all", "ip-masq", "noflush", "v",
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
			if !strings.Contains(all, "--"+f[1]+" ") && !slices.Contains(others, f[1]) {
				t.Errorf("%s: there is no flag --%s", path, f[1])
			}
		}
	}
	if calls < 30 {
		t.Errorf("found %d calls: the test does not see them", calls)
	}
}

// TestAlerts: operate.md tells what to do about each alert, and of no other.
func TestAlerts(t *testing.T) {
	rules, err := os.ReadFile(filepath.Join(root, "deploy", "kustomize", "components", "monitoring", "rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	names := func(pattern, text string) []string {
		var all []string
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			all = append(all, m[1])
		}
		slices.Sort(all)
		return all
	}
	told := names("(?m)^\\| `(IPMasq\\w+)`", documents(t)[filepath.Join(root, "docs", "operate.md")])
	if there := names(`- alert: (\w+)`, string(rules)); len(there) == 0 || !slices.Equal(there, told) {
		t.Errorf("alerts:\n%q\noperate.md has:\n%q", there, told)
	}
}

// TestFindings: troubleshooting.md names each finding of doctor.
func TestFindings(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, "pkg", "diagnose", "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	text := documents(t)[filepath.Join(root, "docs", "troubleshooting.md")]
	id, found := regexp.MustCompile(`\bID: +"([a-z0-9-]+)"`), 0
	for _, file := range append(files, filepath.Join(root, "reconciler", "doctor.go")) {
		code, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range id.FindAllSubmatch(code, -1) {
			found++
			if !strings.Contains(text, "`"+string(m[1])+"`") {
				t.Errorf("docs/troubleshooting.md does not have the finding %s", m[1])
			}
		}
	}
	if found < 30 {
		t.Errorf("found %d findings: the test does not see them", found)
	}
}

// TestThreatModel: each bound of security.md names a test that exists.
func TestThreatModel(t *testing.T) {
	text := documents(t)[filepath.Join(root, "docs", "security.md")]
	named := regexp.MustCompile("`([a-z0-9/]+): (Test[A-Z][A-Za-z0-9]*)`").FindAllStringSubmatch(text, -1)
	if len(named) < 40 {
		t.Errorf("found %d names of tests: this test does not see them", len(named))
	}
	for _, m := range named {
		files, err := filepath.Glob(filepath.Join(root, m[1], "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(files, func(file string) bool {
			source, err := os.ReadFile(file)
			return err == nil && strings.Contains(string(source), "\nfunc "+m[2]+"(t *testing.T) {")
		}) {
			t.Errorf("security.md: there is no %s in %s", m[2], m[1])
		}
	}
	_, bounds, _ := strings.Cut(text, "## What an author")
	for _, row := range regexp.MustCompile(`(?m)^\| .*\|$`).FindAllString(bounds, -1) {
		if !strings.Contains(row, ": Test") && !strings.HasSuffix(row, "| test |") {
			t.Errorf("security.md: no test shows the bound of %s", row)
		}
	}
}
