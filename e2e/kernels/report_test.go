// SPDX-License-Identifier: Apache-2.0

package kernels

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

const (
	root = "../.."
	docs = root + "/docs/kernels/"
)

// report is what a machine said. It is kept as docs/kernels/MACHINE.json, of which the table is made.
type report struct {
	Commit  string
	Facts   map[string]string
	Seconds int
	// Results are by the program's name.
	Results map[string]*result

	current *result
	began   time.Duration
}

type result struct {
	Passed  int
	Failed  []string `json:",omitempty"`
	Seconds int
	// Code is the exit code, empty if the machine ended before the program.
	Code string
}

// String is a cell of the table.
func (r *result) String() string {
	switch {
	case r == nil:
		return "not run"
	case r.Code == "":
		return fmt.Sprintf("%d, then the machine ended", r.Passed)
	case len(r.Failed) > 0:
		return fmt.Sprintf("%d of %d", r.Passed, r.Passed+len(r.Failed))
	case r.Code != "0":
		return fmt.Sprintf("%d, then exit code %s", r.Passed, r.Code)
	case r.Passed == 0:
		return "passed"
	}
	return fmt.Sprint(r.Passed)
}

var ended = regexp.MustCompile(`^--- (PASS|FAIL): (\S+)`)

// line reads a line of the machine's output.
func (r *report) line(t *testing.T, line string, at time.Duration) {
	word, rest, _ := strings.Cut(line, " ")
	switch word {
	case "@fact":
		name, value, _ := strings.Cut(rest, "|")
		r.Facts[name] = value
		t.Logf("%s: %s", name, value)
	case "@begin":
		r.current, r.began = &result{}, at
		r.Results[rest] = r.current
		t.Log(rest)
	case "@end":
		r.current.Code, r.current.Seconds = rest, int((at - r.began).Seconds())
		t.Logf("    %s in %d s %s", r.current, r.current.Seconds, strings.Join(r.current.Failed, ", "))
	case "---":
		if m := ended.FindStringSubmatch(line); m != nil && r.current != nil {
			if m[1] == "PASS" {
				r.current.Passed++
			} else {
				r.current.Failed = append(r.current.Failed, m[2])
			}
		}
	}
}

// commit names the commit that is tested.
func commit(t *testing.T) string {
	t.Helper()
	c := command(t, exec.Command("git", "rev-parse", "--short", "HEAD"))
	if exec.Command("git", "-C", root, "diff", "--quiet", "HEAD", "--", ".", ":!docs").Run() != nil {
		c += " and changes"
	}
	return strings.ReplaceAll(c, "\n", "")
}

func readReport(k kernel) (*report, error) {
	r := &report{}
	data, err := os.ReadFile(docs + k.String() + ".json")
	if err == nil {
		err = json.Unmarshal(data, r)
	}
	return r, err
}

func (r *report) write(t *testing.T, k kernel) {
	t.Helper()
	data, err := json.MarshalIndent(r, "", "\t")
	if err == nil {
		err = os.MkdirAll(docs, 0o755)
	}
	if err == nil {
		err = os.WriteFile(docs+k.String()+".json", append(data, '\n'), 0o644)
	}
	must(t, err)
}

// table returns docs/kernels/README.md, with the last results of all machines.
func table(t *testing.T) string {
	t.Helper()
	var machines, head, rule, failures strings.Builder
	rows := make([]string, len(programs))
	for _, k := range kernels {
		r, err := readReport(k)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		slowdown := assert.Must(time.ParseDuration(r.Facts["slowdown"]))(t)
		fmt.Fprintf(&machines, "| %s | %s | %s | %s | %s | %.0f | %d |\n", k, r.Facts["kernel"], r.Facts["iptables"], r.Facts["nft"],
			r.Commit, slowdown.Seconds(), (r.Seconds+59)/60)
		fmt.Fprintf(&head, " %s |", k)
		rule.WriteString("---|")
		for i, p := range programs {
			s := r.Results[p.name()]
			cell := s.String()
			if k.arch != "amd64" && p.elsewhere == "" {
				cell = "–" // not one of this architecture's
			}
			rows[i] += " " + cell + " |"
			if s != nil && len(s.Failed) > 0 {
				fmt.Fprintf(&failures, "- %s, %s: %s\n", k, p.name(), strings.Join(s.Failed, ", "))
			}
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, `# Kernels

`+"`make e2e-kernels`"+` tests ip-masq in virtual machines and writes this page. It is for operators and
developers who want to know which kernels were tested. [Compatibility](../compatibility.md) has all
other tested software.

Each machine has the kernel and the programs of a Debian suite. The machines are emulated; the
column *slower by* has the factor by which programs start more slowly.
[table_test.go](../../e2e/kernels/table_test.go) lists the tests that run in each machine.

| machine | kernel | iptables | nft | commit | slower by | minutes |
|---|---|---|---|---|---|---|
%s
The next table has the number of tests that passed. Most of them run on each backend.

| tests |%s
|---|%s
`, machines.String(), head.String(), rule.String())
	for i, p := range programs {
		fmt.Fprintf(&b, "| %s |%s\n", p.name(), rows[i])
	}
	if failures.Len() > 0 {
		fmt.Fprintf(&b, "\nFailed:\n\n%s", failures.String())
	}
	return b.String()
}

// command runs a command and returns what it wrote to standard output.
func command(t *testing.T, c *exec.Cmd) string {
	t.Helper()
	var errors bytes.Buffer
	c.Stderr = &errors
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", c, err, errors.String())
	}
	return string(out)
}
