// SPDX-License-Identifier: Apache-2.0

// Command alltests runs the tests of all modules. Its last lines are the failed tests, each as the
// command that runs it alone. Flags are those of go test; with -v passed tests print, too:
//
//	go run ./e2e/alltests -v
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

func main() {
	r := report{out: os.Stdout, verbose: slices.Contains(os.Args[1:], "-v")}
	limit := timelimit.Scale(20 * time.Minute)
	began := time.Now()
	errs := make([]error, 2)
	var all sync.WaitGroup
	// Most tests of this module wait most of the time, so the tests of the tools run beside them.
	for i, modules := range [][]string{{"."}, {"tools/deploy", "tools/bench", "tools/release"}} {
		all.Go(func() {
			for _, module := range modules {
				errs[i] = errors.Join(errs[i], r.test(module, limit))
			}
		})
	}
	all.Wait()
	err := errors.Join(errs...)
	if err != nil {
		fmt.Println(err)
	}
	if !r.end(time.Since(began)) || err != nil {
		os.Exit(1)
	}
}

// test runs the tests of a module. Its error is that of go test.
func (r *report) test(module string, limit time.Duration) error {
	args := []string{"-C", module, "test", "-json", "-count=1", "-timeout=" + limit.String()}
	c := exec.Command("go", slices.Concat(args, os.Args[1:], []string{"./..."})...)
	c.Stderr = os.Stderr
	events, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	lines := bufio.NewReader(events)
	for err == nil {
		var line []byte
		if line, err = lines.ReadBytes('\n'); len(line) > 0 {
			r.add(line)
		}
	}
	if !errors.Is(err, io.EOF) {
		return errors.Join(err, c.Wait())
	}
	if err := c.Wait(); err != nil {
		return fmt.Errorf("go test in %s: %w", module, err)
	}
	return nil
}

// event is a line of `go test -json`, see `go doc test2json`.
type event struct {
	Action, Package, Test, Output string
}

// report collects the events of test programs. It prints what a package printed once the package has
// ended, and in the end which tests failed.
type report struct {
	out     io.Writer
	verbose bool // print what passed tests print, too

	mu       sync.Mutex
	packages map[string]*testedPackage
	counts   map[string]int // tests and subtests by their last action
	failed   []string       // commands
	printed  strings.Builder
}

// testedPackage is a package whose tests run.
type testedPackage struct {
	output []event
	state  map[string]string // the last action of each test
}

// add takes a line of `go test -json`.
func (r *report) add(line []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var e event
	if err := json.Unmarshal(line, &e); err != nil {
		e.Output = string(line)
	}
	if e.Package == "" { // of the go command, such as errors of the compiler
		_, _ = io.WriteString(r.out, e.Output)
		return
	}
	p := r.packages[e.Package]
	if p == nil {
		if r.packages == nil {
			r.packages, r.counts = map[string]*testedPackage{}, map[string]int{}
		}
		p = &testedPackage{state: map[string]string{}}
		r.packages[e.Package] = p
	}
	switch {
	case e.Action == "output":
		p.output = append(p.output, e)
	case e.Test != "":
		p.state[e.Test] = e.Action
	case e.Action == "pass" || e.Action == "fail": // "skip" is a package without tests
		r.ended(e.Package, p, e.Action == "fail")
	}
}

// ended prints what the package printed, and records its tests.
func (r *report) ended(name string, p *testedPackage, failed bool) {
	var wrong []string // failed, skipped, or running when the package ended
	for test, state := range p.state {
		r.counts[state]++
		if state != "pass" && state != "pause" {
			wrong = append(wrong, test)
		}
	}
	for _, e := range p.output {
		ofFailed := slices.Contains(wrong, e.Test) || e.Test == "" && e.Output != "PASS\n"
		if r.verbose || ofFailed {
			_, _ = io.WriteString(r.out, e.Output)
		}
		if r.verbose && failed && ofFailed {
			r.printed.WriteString(e.Output)
		}
	}
	directory := cmp.Or(strings.TrimPrefix(strings.TrimPrefix(name, "github.com/ip-masq/ip-masq-cni"), "/"), ".")
	for _, test := range wrong {
		if !slices.ContainsFunc(wrong, func(other string) bool { return strings.HasPrefix(other, test+"/") }) {
			r.failed = append(r.failed, fmt.Sprintf("make test-one IN=%s TEST=%s", directory, plain(test)))
		}
	}
	if failed && len(wrong) == 0 { // it does not build, or its TestMain failed
		r.failed = append(r.failed, "go -C "+directory+" test .")
	}
}

// plain returns the name of a test up to the first part that a shell, make or a regular expression
// would change.
func plain(test string) string {
	parts := strings.Split(test, "/")
	for i, part := range parts {
		if !regexp.MustCompile(`^[\w.,:=@-]+$`).MatchString(part) {
			return strings.Join(parts[:i], "/")
		}
	}
	return test
}

// end prints the numbers of tests and what failed. It reports whether every test passed. A skipped
// test is a failed one: nobody would notice that it fails.
func (r *report) end(took time.Duration) (passed bool) {
	const most = 16 << 10
	if text := r.printed.String(); text != "" { // nobody finds it in the output of 6000 tests
		fmt.Fprintf(r.out, "\nwhat failed tests printed:\n%s", text[max(0, len(text)-most):])
	}
	fmt.Fprintf(r.out, "\ntests: %d passed, %d failed, %d skipped in %s\n", r.counts["pass"], r.counts["fail"], r.counts["skip"], took.Round(time.Second))
	if len(r.failed) > 0 {
		fmt.Fprintf(r.out, "failed, each with the command that runs it alone:\n  %s\n", strings.Join(slices.Compact(slices.Sorted(slices.Values(r.failed))), "\n  "))
	}
	return len(r.failed) == 0 && r.counts["pass"] > 0
}
