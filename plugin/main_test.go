// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

// sandboxed runs the tests where they can do no harm.
type sandboxed struct{ *testing.M }

func (s sandboxed) Run() int { return sandbox.Run(s.M) }

func TestMain(m *testing.M) {
	testscript.Main(sandboxed{m}, map[string]func(){"ip-masq": main})
}

// TestScripts runs the plugin as runtimes do: environment and standard input in,
// standard output and exit code out. Each script has the variables of the CNI
// protocol but CNI_COMMAND set to something. They run at the same time in one
// network namespace, so only one of them may write rules.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Cmds:                map[string]func(*testscript.TestScript, bool, []string){"prints": prints},
		Setup: func(e *testscript.Env) error {
			for name, value := range map[string]string{
				"CNI_CONTAINERID": "pod1", "CNI_NETNS": "/run/netns/pod1", "CNI_IFNAME": "eth0", "CNI_PATH": e.WorkDir,
			} {
				e.Setenv(name, value)
			}
			return writeExamples(e.WorkDir)
		},
	})
}

// writeExamples writes each call of the manual page into a script that its CNI_COMMAND names.
func writeExamples(dir string) error {
	page, err := os.ReadFile("ip-masq.8.md")
	here := strings.NewReplacer("/opt/cni/bin/ip-masq", "ip-masq", "/tmp/ip-masq", filepath.Join(dir, "data"))
	for _, m := range regexp.MustCompile("(?s)\n```\n(CNI_COMMAND=([A-Z]+) .*?)```\n").FindAllStringSubmatch(string(page), -1) {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, m[2]+".sh"), []byte(here.Replace(m[1])), 0o644))
	}
	return err
}

// prints holds what the last program printed against a file, but for the line
// feed at the end, which CNI results have not and files do.
func prints(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: prints file")
	}
	want := strings.TrimSpace(ts.ReadFile(args[0]))
	if d := cmp.Diff(want, strings.TrimSpace(ts.ReadFile("stdout"))); d != "" {
		ts.Fatalf("stdout is not what %s says:\n%s", args[0], d)
	}
}
