// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// TestReport checks what is printed, and which commands are named, for packages with tests that fail, panic,
// hang and are skipped, and for one that does not build.
func TestReport(t *testing.T) {
	const module = "github.com/ip-masq/ip-masq-cni"
	events := func(name, text string) (lines []event) {
		for line := range strings.Lines(text) {
			test, action, _ := strings.Cut(strings.TrimSpace(line), " ")
			e := event{Package: module + name, Test: strings.TrimPrefix(test, "-"), Action: action}
			if out, is := strings.CutPrefix(action, "output "); is {
				e.Action, e.Output = "output", out+"\n"
			}
			lines = append(lines, e)
		}
		return lines
	}
	var all []event
	all = append(all, event{Output: "x_test.go:3: undefined: x\n"})
	all = append(all, events("/e2e", `TestGood run
		TestGood output fine
		TestGood pass
		TestKeys run
		TestKeys output === RUN
		TestKeys/nft run
		TestKeys/nft output bad
		TestKeys/nft fail
		TestKeys/nft-other pass
		TestKeys/a(b) output worse
		TestKeys/a(b) fail
		TestKeys fail
		- output FAIL e2e
		- fail`)...)
	all = append(all, events("/tools/deploy/alerts", `TestHangs run
		TestHangs/forever run
		TestWaits run
		TestWaits pause
		TestHangs/forever output panic: test timed out
		- fail`)...)
	all = append(all, events("/pkg/store", "- output FAIL store [build failed]\n- fail")...)
	all = append(all, events("", "TestRoot skip\n- output PASS\n- output ok root\n- pass")...)
	all = append(all, events("/docs", "- output ? docs [no test files]\n- skip")...)
	commands := `
failed, each with the command that runs it alone:
  go -C pkg/store test .
  make test-one IN=. TEST=TestRoot
  make test-one IN=e2e TEST=TestKeys
  make test-one IN=e2e TEST=TestKeys/nft
  make test-one IN=tools/deploy/alerts TEST=TestHangs/forever
`
	numbers := "\ntests: 2 passed, 3 failed, 1 skipped in 1m2s"
	for verbose, want := range map[bool]string{
		false: "x_test.go:3: undefined: x\n=== RUN\nbad\nworse\nFAIL e2e\npanic: test timed out\nFAIL store [build failed]\nok root\n" +
			numbers + commands,
		true: "x_test.go:3: undefined: x\nfine\n=== RUN\nbad\nworse\nFAIL e2e\npanic: test timed out\nFAIL store [build failed]\nPASS\nok root\n" +
			"\nwhat failed tests printed:\n=== RUN\nbad\nworse\nFAIL e2e\npanic: test timed out\nFAIL store [build failed]\n" + numbers + commands,
	} {
		var out strings.Builder
		r := report{out: &out, verbose: verbose}
		for _, e := range all {
			line := assert.Must(json.Marshal(e))(t)
			r.add(append(line, '\n'))
		}
		if r.end(62 * time.Second) {
			t.Error("passed")
		}
		assert.Equal(t, fmt.Sprint("verbose ", verbose), out.String(), want)
	}
	r := report{out: &strings.Builder{}}
	if r.end(0) {
		t.Error("passed without a test")
	}
	r.add([]byte(`{"Action":"pass","Package":"p","Test":"TestX"}` + "\n"))
	r.add([]byte(`{"Action":"pass","Package":"p"}` + "\n"))
	if !r.end(0) {
		t.Error("a test that passed counts as failed")
	}
}
