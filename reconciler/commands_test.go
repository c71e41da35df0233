// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// TestHelp: the help of each command begins with an imperative sentence, has the exit codes and three
// examples, and fits into 100 columns. The command line accepts the flags and arguments of each example.
func TestHelp(t *testing.T) {
	t.Parallel()
	imperative := regexp.MustCompile(`^[A-Z][a-z]*[a-rt-z] .*[^.]$`) // "Keeps" and a full stop are mistakes
	call := regexp.MustCompile(`ip-masq-reconciler( [^|&;<>()]*)?`)
	commands := []*cobra.Command{testRoot("")}
	for i := 0; i < len(commands); i++ {
		c := commands[i]
		commands = append(commands, c.Commands()...)
		if !c.Runnable() || c.Name() == "help" { // cobra's own
			continue
		}
		if !imperative.MatchString(c.Short) || len(c.Short) > 80 {
			t.Errorf("%s: Short is %q", c.CommandPath(), c.Short)
		}
		if n := strings.Count(c.Long, "\nExit codes: 0 "); n != 1 || !strings.Contains(c.Long, "; ") {
			t.Errorf("%s: Long has no exit codes:\n%s", c.CommandPath(), c.Long)
		}
		examples := 0
		for line := range strings.Lines(c.Example) {
			if strings.HasPrefix(line, "  # ") || line == "\n" {
				continue
			}
			own := false
			for _, m := range call.FindAllStringSubmatch(line, -1) {
				root := testRoot(m[1])
				ran, err := root.ExecuteC()
				if err != nil {
					t.Errorf("%s: example %q: %v", c.CommandPath(), line, err)
				}
				own = own || !c.HasParent() || ran.CommandPath() == c.CommandPath()
			}
			if !own {
				t.Errorf("%s: example %q does not call it", c.CommandPath(), line)
			}
			examples++
		}
		if examples < 3 {
			t.Errorf("%s has %d examples", c.CommandPath(), examples)
		}
		for line := range strings.Lines(helpOf(t, c)) {
			if n := len(strings.TrimSuffix(line, "\n")); n > 100 {
				t.Errorf("%s: %d columns: %s", c.CommandPath(), n, line)
			}
		}
	}
	if len(commands) < 13 {
		t.Errorf("found %d commands", len(commands))
	}
}

// testRoot returns the command line with these arguments and without what the commands do.
func testRoot(args string) *cobra.Command {
	a := &app{out: io.Discard, err: io.Discard}
	root := a.root()
	root.InitDefaultHelpCmd()
	for _, c := range append(root.Commands(), root) {
		c.RunE = func(*cobra.Command, []string) error { return nil }
	}
	root.SetArgs(withTwoDashes(root, strings.Fields(args)))
	return root
}

func helpOf(t *testing.T, c *cobra.Command) string {
	t.Helper()
	var text strings.Builder
	c.InitDefaultHelpFlag()
	c.SetOut(&text)
	assert.NoError(t, c.Help())
	return text.String()
}
